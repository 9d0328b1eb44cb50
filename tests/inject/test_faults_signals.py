"""Signals while a process is rematerializing: how it ends, the final messages, and what is left behind."""

import contextlib
import json
import os
import signal
import time

import pytest

from tests.waiting import is_running, until

REPLAYS = """
import os, sys, torch
print(os.getpid(), flush=True)
foot = torch.randn(128, 128)
kept, x = [], foot
for _ in range(60):
    x = torch.tanh(x) + 1
    kept.append(x)
print("ready", flush=True)
for _ in range(10_000):  # all but the first few are evicted: this is hardly anything but rematerialization
    for one in reversed(kept):
        one.sum()
"""


@pytest.fixture
def replaying(program, started):
    """Start dtrrun on the text above; return the launcher, and the id of the process that trains."""
    program("replays.py", REPLAYS)
    children = []

    def start(target=()):
        words = ("--budget", "1MB", "--json", "r.json", *(target or ["replays.py"]))
        child = started(*words, start_new_session=True)
        children.append(child)
        pid = int(child.stdout.readline())
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.5)
        return child, pid

    yield start
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "to"),
    [("SIGINT", "launcher"), ("SIGTERM", "launcher")]
    + [(name, "training process") for name in ("SIGINT", "SIGTERM", "SIGKILL")],
)
def test_a_signal_in_the_middle_of_a_rematerialization(replaying, tmp_path, name, to):
    child, pid = replaying()
    number = getattr(signal, name)
    os.kill(child.pid if to == "launcher" else pid, number)
    _, err = child.communicate(timeout=300)
    assert child.returncode == -number, err
    until(lambda: not is_running(pid))
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["exit_code"] == 128 + number
    assert report["processes"][0]["rematerializations"] > 100
    assert "rematerializ" in err, "the final table is missing"
    assert [name for name in os.listdir(tmp_path) if name.startswith("dtrrun-")] == []


@pytest.mark.parametrize("between", [[], ["sh", "-c", "python replays.py; true"]], ids=["directly", "shell"])
def test_a_launcher_that_is_killed_takes_the_training_process_with_it(replaying, tmp_path, between, dtrrun):
    child, pid = replaying(target=between)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    until(lambda: not is_running(pid))
    left = [name for name in os.listdir(tmp_path) if name.startswith("dtrrun-")]
    assert len(left) == 1
    dtrrun("true")
    assert [name for name in os.listdir(tmp_path) if name.startswith("dtrrun-")] == []


def test_a_target_that_outlives_a_launcher_that_ended_well_goes_on(program, dtrrun, tmp_path):
    program(
        "detached.py",
        "import os, sys, time, torch\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "os.execv(sys.executable, [sys.executable, 'trains.py'])\n",
    )
    program(
        "trains.py",
        "import time, torch\n"
        "until = time.monotonic() + 6\n"
        "while time.monotonic() < until:\n"
        "    torch.ones(1000).sum()\n"
        "open('went on', 'w').close()\n",
    )
    dtrrun("sh", "-c", "python detached.py >/dev/null 2>&1")
    until((tmp_path / "went on").exists, 40)  # it was not ended
