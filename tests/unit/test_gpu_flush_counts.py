"""tests/bench/gpu_flush_counts.py counts the same on a model that computes nothing as on one that does."""

from typing import NamedTuple

import pytest

from dtrrun.runtime.cuda import budget as constants
from dtrrun.runtime.cuda.budget import LEAST_GUARD
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.models.task import task_of
from tests.bench.gpu_flush_counts import CONTEXT, train
from tests.bench.gpu_flush_ideas import IDEAS
from tests.unit.fake_gpu import REAL, Allocator, FakeGpu

UNIT = 16 << 10
STEPS = 2
SIZES = {
    "unet": {"batch_size": 4, "height": 64, "width": 64, "base": 4},
    "gpt2": {"batch_size": 16, "vocabulary": 100, "context": 64, "width": 64, "heads": 2, "depth": 4},
    "densenet121": {"batch_size": 8, "size": 64, "layers": (3, 3), "growth": 8, "classes": 10},
}


class Counts(NamedTuple):
    peak: int
    flushes: float
    evictions: float
    recomputed: float
    rows: list
    total: int


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(constants, "SEGMENT", 20 * UNIT)
    monkeypatch.setattr(constants, "LEAST_SLACK", 22 * UNIT)


def counted(name, budget, idea=None, computes=False):
    """Return the peak, and what the bench counts together with all allocated bytes."""
    gpu = FakeGpu(CONTEXT, Allocator(**REAL | {"unit": UNIT}), computes)
    case = BY_NAME[name]
    peak, rows = train(lambda: task_of(case, "cpu", False, SIZES[name]).step, budget, STEPS, idea, gpu)
    flushes, _, _, evictions, recomputed, _ = map(sum, zip(*rows, strict=True))
    return Counts(peak, flushes, evictions, recomputed, rows, gpu.allocator.total)


def two_thirds(name):
    return CONTEXT + LEAST_GUARD + counted(name, None).peak * 2 // 3 + 22 * UNIT


@pytest.mark.parametrize("name", SIZES)
def test_counts_are_those_of_a_gpu_that_computes(name):
    budget = two_thirds(name)
    without = counted(name, budget)
    assert without == counted(name, budget, computes=True)
    assert without.evictions > 10
    assert without.flushes > 0
    assert without.recomputed > 0


def test_ideas_do_what_they_say():
    budget = two_thirds("gpt2")
    found = {idea: counted("gpt2", budget, use) for idea, use in IDEAS.items()}
    flushes = {idea: counts.flushes for idea, counts in found.items()}
    assert flushes["slack-6%"] == flushes["slack-holes"] == 0 < flushes["holes"] < flushes["none"]
    assert flushes["step-end"] == flushes["none"] + STEPS
    assert found["slack-12%"].peak < found["none"].peak
