"""`dtrrun top`, from a process outside the run."""

import json
import os
import select
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys, torch
from torch import nn
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
print("trained", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(program, started):
    """A live run that has trained three steps and waits."""
    process = started("--quiet", "--budget", "1GB", program("waits.py", SCRIPT), stdin=subprocess.PIPE)
    assert process.stdout.readline() == "trained\n"
    yield process
    process.communicate("go on\n", timeout=300)


def test_a_run_is_seen_from_elsewhere(run, plain):
    deadline = time.monotonic() + 30
    steps = 0
    while steps < 3 and time.monotonic() < deadline:  # it publishes at intervals
        done = plain(sys.executable, "-m", "dtrrun", "top", "--json", "-")
        assert done.status == 0, done.err
        [found] = [one for one in json.loads(done.out)["runs"] if one["pid"] == run.pid]
        steps = found["steps"]
    assert found["settings"]["budget_bytes"] == 10**9
    assert found["processes"][0]["status"] == "running"
    assert found["command"][-1].endswith("waits.py")

    done = plain(sys.executable, "-m", "dtrrun", "top")
    assert [line for line in done.out.splitlines() if line.split()[0] == str(run.pid)]
    inner = found["processes"][0]["pid"]
    for pid in (run.pid, inner):
        done = plain(sys.executable, "-m", "dtrrun", "top", str(pid))
        assert (done.status, done.out.split()[0]) == (0, str(run.pid))
        assert "of 1 GB" in done.out


def test_a_run_is_ended_by_a_key(run, environment):
    """In a terminal: e, and y for yes. The run's command ends as by SIGTERM, and top goes on."""
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "dtrrun", "top", str(run.pid)], environment)
    seen = bytearray()

    def until(text):
        deadline = time.monotonic() + 60
        while text not in bytes(seen):
            assert time.monotonic() < deadline, bytes(seen)
            if select.select([terminal], [], [], 1)[0]:
                try:
                    seen.extend(os.read(terminal, 4096))
                except OSError:  # it has ended
                    return

    until(b"e: end a run")
    os.write(terminal, b"e")
    until(b"waits.py? y: yes")
    assert run.poll() is None
    os.write(terminal, b"y")
    assert run.wait(60) == -signal.SIGTERM
    until(b"the run has ended")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_no_such_run(plain):
    done = plain(sys.executable, "-m", "dtrrun", "top", "999999999")
    assert (done.status, done.ours) == (1, ["error: there is no dtrrun run with PID 999999999"])
    assert plain(sys.executable, "-m", "dtrrun", "top", "--", "0").status == 2
