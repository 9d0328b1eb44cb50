"""For the tests of parts."""

import pytest
from hypothesis import HealthCheck, settings

from dtrrun.cli.main import main

# How long an example takes depends on what else the machine does.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


@pytest.fixture
def command(capfd):
    """Return a function that runs `dtrrun` in this process: it returns the exit status, output and errors."""

    def command(*words):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        return ended.value.code, *capfd.readouterr()

    return command


@pytest.fixture
def refused(command):
    """Return a function that runs what must end at once, and returns the line that says why."""

    def refused(*words, status=2):
        code, out, err = command(*words)
        assert (code, out, err.count("\n")) == (status, "", 1)
        assert err.startswith("dtrrun: error: ")
        return err.removeprefix("dtrrun: error: ").rstrip()

    return refused
