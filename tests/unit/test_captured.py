"""dtrrun.launch.captured"""

import os
import sys
import time

import pytest

from dtrrun.launch.captured import TAIL_BYTES, run_captured
from dtrrun.launch.errors import LaunchError


def run(code, patience=60.0, attend=lambda: None):
    return run_captured([sys.executable, "-c", code], os.environ, patience, attend)


def test_output_is_kept_back_and_its_end_told(capfd):
    code = "import sys; print('a' * 9000); sys.stdout.flush(); print('end', file=sys.stderr); sys.exit(7)"
    ended = run(code)
    assert (ended.returncode, ended.timed_out) == (7, False)
    assert ended.tail.endswith("a\nend\n")
    assert len(ended.tail) == TAIL_BYTES
    assert capfd.readouterr() == ("", "")


def test_there_is_nothing_to_read():
    assert run("import sys; sys.exit(len(sys.stdin.read()))").returncode == 0


SLEEPS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
"""


def gone(pid, within=10.0):
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_what_takes_too_long_is_ended_with_its_children():
    ended = run(SLEEPS + "child.wait()", patience=1.0)
    assert ended.timed_out
    assert ended.returncode < 0
    assert gone(int(ended.tail.split()[0]))


def test_what_it_leaves_running_is_ended():
    ended = run(SLEEPS)
    assert ended.returncode == 0
    assert gone(int(ended.tail))


def test_an_interruption_ends_it(tmp_path):
    path = tmp_path / "pid"
    code = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def attend():
        if path.exists() and path.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(code, attend=attend)
    assert gone(int(path.read_text()))


def test_what_cannot_be_started():
    with pytest.raises(LaunchError) as caught:
        run_captured(["/nowhere/at-all"], os.environ, 1.0, lambda: None)
    assert caught.value.exit_status == 127
