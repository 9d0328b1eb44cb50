"""dtrrun.launch.environment"""

import os

import pytest

from dtrrun.launch import environment
from dtrrun.launch.environment import HOOK, child_environment
from dtrrun.launch.errors import LaunchError
from dtrrun.settings import RuntimeSettings

SETTINGS = RuntimeSettings(budget_bytes=1, record_dir="/records")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, HOOK),
        ("", HOOK),
        ("/a", f"{HOOK}:/a"),
        ("/a::b:", f"{HOOK}:/a::b:"),  # an empty folder means the current one
        (f"{HOOK}:/a", f"{HOOK}:/a"),  # one dtrrun inside another
        (HOOK, HOOK),
    ],
)
def test_our_hook_comes_first_and_the_rest_stays(before, after):
    environ = {} if before is None else {"PYTHONPATH": before}
    assert child_environment(SETTINGS, environ)["PYTHONPATH"] == after


def test_all_else_stays_and_the_settings_come_with_it():
    found = child_environment(SETTINGS, {"HOME": "/h", "DTRRUN_BUDGET": "1B"})
    assert (found["HOME"], found["DTRRUN_BUDGET"], found["DTRRUN_RECORDS"]) == ("/h", "1B", "/records")
    assert RuntimeSettings.from_environment(found) == SETTINGS


def test_the_hooks_folder_holds_nothing_that_a_program_could_import_by_accident():
    files = {name for name in os.listdir(HOOK) if name != "__pycache__"}
    assert files == {"sitecustomize.py", "_dtrrun_hook.py"}


def test_a_folder_that_pythonpath_cannot_name(monkeypatch):
    monkeypatch.setattr(environment, "HOOK", "/a:b/dtrrun/boot/path")
    with pytest.raises(LaunchError, match="PYTHONPATH cannot hold") as caught:
        child_environment(SETTINGS, {})
    assert caught.value.exit_status == 125
