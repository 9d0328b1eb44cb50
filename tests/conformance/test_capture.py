"""The harness that compares two runs notices a difference of one bit, wherever it is."""

import json
import random
import subprocess
import sys

import pytest
import torch

from tests.bench.capture import rng_bits, state_bits
from tests.bench.runs import CAPTURE, Run, difference, environment


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8)[0] ^= 1


class Program:
    """A trained model, its optimizer, and a module that has no name in the script."""

    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.kept = [torch.nn.Linear(2, 2)]
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()

    def captured(self) -> Run:
        state = state_bits({"model": self.model, "optimizer": self.optimizer})
        return Run(0, "", {"state": state, "rng": rng_bits(), "stdout": []})


CHANGES = {
    "state: model.0.weight": lambda program: flip(program.model[0].weight),
    "state: model.0.weight.grad": lambda program: flip(program.model[0].weight.grad),
    "state: model.1.running_var": lambda program: flip(program.model[1].running_var),
    "state: optimizer.state.1": lambda program: flip(
        program.optimizer.state[program.model[0].bias]["exp_avg"]
    ),
    "state: optimizer.param_groups": lambda program: program.optimizer.param_groups[0].update(lr=2.0),
    "state: Module without a name, ": lambda program: flip(program.kept[0].weight),
    "state: other names": lambda program: program.model.register_buffer("more", torch.zeros(1)),
    "rng: torch": lambda program: torch.rand(()),
    "rng: python": lambda program: random.random(),
}


@pytest.mark.parametrize(("found", "change"), CHANGES.items(), ids=list(CHANGES))
def test_one_bit_is_found(found, change):
    program = Program()
    before = program.captured()
    assert difference(before, program.captured()) == ""
    change(program)
    assert difference(before, program.captured()).startswith(found)


def test_script_is_run_unchanged_and_timed(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "capture.json"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(1)).backward()\n"
        "    optimizer.step()\n"
        "print(__name__, *sys.argv[1:])\n"
    )
    command = [sys.executable, CAPTURE, out, script, "--steps", "3"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    run = Run(0, result.stderr, json.loads(out.read_text()))
    assert result.stdout == "__main__ --steps 3\n"
    assert run.capture["stdout"] == ["__main__ --steps 3"]
    assert {"model.weight", "model.weight.grad", "optimizer.param_groups"} < run.capture["state"].keys()
    assert run.step_seconds == run.capture["step_seconds"][2] > 0
    assert run.capture["resident_peak_bytes"] > 50_000_000  # torch alone takes more

    other = Run(0, "", {**run.capture, "stdout": ["__main__"]})
    assert difference(run, other) == "output: '__main__ --steps 3', '__main__'"
