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
    assert program.clock.slowdowns.median() is None
    for _ in range(4):
        program.step(1_000, 800)
    program.step(1_000, 50_000)
    assert program.clock.slowdowns.median() == pytest.approx(1.8)
    program.step(0, 10)
    assert program.clock.slowdowns.median() < steps.MOST


@pytest.mark.parametrize("length", [1, 2, 256, 257, 1000, 100_000])
def test_a_series_of_any_length_takes_no_more_memory(length):
    sample = Sample()
    for value in range(length):
        sample.add(value)
    assert len(sample._values) <= steps.SAMPLED
    assert sample.median() == pytest.approx((length - 1) / 2, rel=0.02)
