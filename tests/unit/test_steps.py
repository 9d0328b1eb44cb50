"""`runtime.observe.steps`: the time of a step once the program has warmed up."""

import pytest
import torch

from dtrrun.runtime.observe import steps
from dtrrun.runtime.observe.steps import Sample, StepClock
from dtrrun.telemetry.fields import OVERHEADS


class Program:
    """Makes optimizer steps that take the given nanoseconds of own work and of recomputation."""

    def __init__(self):
        self.totals = dict.fromkeys(("wall_ns", "operators_ns", *OVERHEADS), 0)
        self.clock = StepClock(self.totals.copy, lambda: None)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)

    def step(self, own_ns, recomputed_ns):
        self.totals["wall_ns"] += own_ns + recomputed_ns
        self.totals["operators_ns"] += own_ns
        self.totals["rematerialization_ns"] += recomputed_ns
        self.optimizer.step()


@pytest.fixture
def program():
    made = Program()
    made.clock.install()
    yield made
    made.clock.remove()


def test_the_first_step_and_the_exceptional_one_do_not_count(program):
    program.step(5_000_000, 10_000)  # includes PyTorch's startup
    for _ in range(3):
        program.step(1_000, 800)
        assert program.clock.slowdown() is None  # too few to say
    program.step(1_000, 50_000)
    assert program.clock.slowdown() == pytest.approx(1.8)
    for _ in range(3):
        program.step(0, 10)
    assert program.clock.slowdown() < steps.MOST


def test_an_optimizer_of_others_makes_one_step(program):
    """As torchtitan's do. What it consists of makes no steps of its own, which would be over in no time."""

    class Several(torch.optim.Optimizer):
        def __init__(self, *optimizers):
            self.optimizers = optimizers
            super().__init__([torch.nn.Parameter(torch.ones(1))], {})

        def step(self, closure=None):
            for one in self.optimizers:
                one.step()

    seen = []
    program.clock._stepped = seen.append
    inner = [program.optimizer, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)]
    program.optimizer = Several(*inner)
    for _ in range(5):
        program.step(1_000, 800)
    assert program.clock.count == 5
    assert program.clock.slowdown() == pytest.approx(1.8)
    assert seen == [*inner, program.optimizer] * 5  # all may have state
    inner[0].step()
    assert program.clock.count == 6


def test_on_a_gpu_a_step_takes_as_long_as_its_operators_there(program):
    """The host launches recomputation that takes the GPU twice the step's own work."""
    program.totals |= {"device_operators_ns": 0, "device_rematerialization_ns": 0}
    program.clock._before = program.totals.copy()
    for _ in range(5):
        program.totals["device_operators_ns"] += 1_000_000
        program.totals["device_rematerialization_ns"] += 2_000_000
        program.step(100_000, 200_000)
    assert program.clock.slowdown() == pytest.approx(3.0)
    assert (program.clock.last["operators_ns"], program.clock.last["wall_ns"]) == (1_000_000, 3_000_000)


@pytest.mark.parametrize("length", [1, 2, 256, 257, 1000, 100_000])
def test_a_series_of_any_length_takes_no_more_memory(length):
    sample = Sample()
    for value in range(length):
        sample.add(value)
    assert len(sample._values) <= steps.SAMPLED
    assert sample.median() == pytest.approx((length - 1) / 2, rel=0.02)
