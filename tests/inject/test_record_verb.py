"""`dtrrun record` in real interpreters."""

import resource
import subprocess
import sys

import pytest

from dtrrun.simulator.live import predict
from dtrrun.simulator.log import Call, read_log
from dtrrun.simulator.schedule import read_schedule

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1, 4):
    optimizer.zero_grad()
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
    print("step", step)
"""


@pytest.fixture
def record(plain):
    return lambda *words: plain(sys.executable, "-m", "dtrrun", "record", *words)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_second_step(record, script, tmp_path):
    run = record("-o", "step.log", str(script))
    assert run.status == 0, run.err
    assert run.out == "step 1\n"  # it ends with the recorded step
    assert run.ours[-1].startswith(f"wrote step 2 to {tmp_path / 'step.log'}: ")
    path = tmp_path / "step.log"
    (step,) = predict(path, None).steps
    assert step.index == 2
    assert step.peak_bytes > 2 * 256 * 64 * 4
    names = [one.operator for one in read_log(path) if isinstance(one, Call)]
    assert names.count("aten.addmm") == 2
    schedule = read_schedule(path)
    assert schedule.backward is not None
    assert schedule.cost > 0


def test_a_range_and_the_rest_of_the_program(record, script, tmp_path):
    """A child forked within a step does not touch the log."""
    script.write_text(SCRIPT + "    import os\n    if not os.fork():\n        os._exit(0)\n    os.wait()\n")
    run = record("-o", "steps.log.gz", "--step", "1-2", "--go-on", "--device", "cpu", "--quiet", str(script))
    assert (run.status, run.out) == (0, "step 1\nstep 2\nstep 3\n"), run.err
    assert [step.index for step in predict(tmp_path / "steps.log.gz", None).steps] == [1, 2]
    left = {path.name for path in tmp_path.iterdir() if "step" in path.name}
    assert left == {"steps.log.gz"}


def test_a_program_that_ends_before(record, script, tmp_path):
    (tmp_path / "step.log").write_text("as it was")
    run = record("-o", "step.log", "--step", "7", "--quiet", str(script))
    assert run.status == 125
    assert run.ours == ["error: nothing was recorded: the program ended before the end of step 7"]
    assert (tmp_path / "step.log").read_text() == "as it was"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def names(folder):
    """Return all names except those that PyTorch leaves in the folder for temporary files."""
    return {one.name for one in folder.iterdir() if not one.name.startswith("torch")}


def test_a_full_disk(environment, script, tmp_path):
    """A file size limit stands for a full disk: only the log exceeds it."""
    many = "for _ in range(4000):\n        torch.ones(2).add(1)\n    optimizer.step()"
    script.write_text(SCRIPT.replace("optimizer.step()", many))
    done = subprocess.run(
        [sys.executable, "-m", "dtrrun", "record", "--quiet", "-o", "step.log", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )
    path = tmp_path / "step.log"
    assert (done.returncode, done.stdout) == (125, "step 1\n")
    assert done.stderr == f"dtrrun: error: nothing was recorded: {path} cannot be written: File too large\n"
    assert names(tmp_path) == {"train.py"}


def test_a_program_that_is_killed_after_the_step_leaves_its_log(record, script, tmp_path):
    script.write_text(SCRIPT + "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    run = record("--go-on", "-o", "step.log", str(script))
    assert run.status == -9
    assert run.ours[-1].startswith(f"wrote step 2 to {tmp_path / 'step.log'}: ")
    assert names(tmp_path) == {"train.py", "step.log"}
