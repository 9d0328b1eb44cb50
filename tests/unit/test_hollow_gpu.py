"""On a GPU that computes nothing, the same is evicted, recomputed and flushed as on the one that computes."""

import importlib

import pytest
import torch
from fake_gpu import FakeGpu, fake_session
from fake_growing import Growing

from dtrrun.runtime import shares
from dtrrun.runtime.shares import LEAST_GUARD, MIB
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu_hole_ideas import IDEAS
from tests.bench.hollow_gpu import HollowGpu

CONTEXT = 300 * MIB
UNIT = 16 << 10
SIZES = {
    "unet": {"batch_size": 4, "height": 64, "width": 64, "base": 4},
    "gpt2": {"batch_size": 16, "vocabulary": 100, "context": 64, "width": 64, "heads": 2, "depth": 4},
    "densenet121": {"batch_size": 8, "size": 64, "layers": (3, 3), "growth": 8, "classes": 10},
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(shares, "SEGMENT", 20 * UNIT)
    monkeypatch.setattr(shares, "LEAST_SLACK", 22 * UNIT)


def counted(gpu, name, budget, idea=None):
    gpu.allocator = Growing(unit=UNIT)
    module = importlib.import_module(f"tests.bench.gpu.models.{BY_NAME[name].module}")
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_session(patch, budget, gpu=gpu, cost="model") as (one, _),
    ):
        if idea is not None:
            idea(one, gpu.allocator, patch)
        torch.manual_seed(0)
        step = module.task("cpu", False, **SIZES[name]).step
        for _ in range(2):
            step()
        found = one.report()
    allocator = gpu.allocator
    what = "peak_bytes", "evictions", "rematerializations", "oom_retries"
    return [found[one] for one in what], (allocator.flushes, allocator.unmapped, allocator.total)


@pytest.mark.parametrize("name", SIZES)
def test_counts_are_those_of_a_gpu_that_computes(name):
    (peak, *_), _ = counted(HollowGpu(CONTEXT), name, None)
    budget = CONTEXT + LEAST_GUARD + peak * 2 // 3 + 22 * UNIT
    hollow = counted(HollowGpu(CONTEXT), name, budget)
    assert hollow == counted(FakeGpu(CONTEXT), name, budget)
    assert hollow[0][1] > 10
    assert hollow[1][0] > 0


def test_ideas_do_what_they_say():
    name, steps = "densenet121", 2
    (peak, *_), _ = counted(HollowGpu(CONTEXT), name, None)
    budget = CONTEXT + LEAST_GUARD + peak * 2 // 3 + 22 * UNIT
    found = {idea: counted(HollowGpu(CONTEXT), name, budget, use) for idea, use in IDEAS.items()}
    flushes = {idea: allocated[0] for idea, (_, allocated) in found.items()}
    assert flushes["holes"] == flushes["slack-holes"] == 0 < flushes["slack-6%"] < flushes["none"]
    assert flushes["step-end"] == flushes["none"] + steps
    peaks = {idea: counts[0] for idea, (counts, _) in found.items()}
    assert peaks["slack-12%"] < peaks["none"]
    assert found["joining-10"] != found["none"]
