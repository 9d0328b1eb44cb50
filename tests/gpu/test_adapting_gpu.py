"""`--over-budget raise`: a budget that is too small, and a neighbour that grows on the same device."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from gpu_programs import DEVICE, HOLLOW, MIB, beside, budget_for, forget, mlp, same, tensor, train
from hollow_gpu import peak
from torch.optim.optimizer import register_optimizer_step_post_hook

import dtrrun

pytestmark = [
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(not HOLLOW, reason="needs python -m tests.hollow: it fills the device"),
]
SPACE = (64 + 22) * MIB  # guard and slack
NEIGHBOUR = """
import ctypes, sys
cuda, at = ctypes.CDLL(None), ctypes.c_void_p()
cuda.cudaFree(None)
print("here", flush=True)
for line in sys.stdin:
    if int(line):
        print(cuda.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(int(line))), flush=True)
    else:
        print(cuda.cudaFree(at), flush=True)
"""


@pytest.fixture
def grow():
    """Let another process take so many bytes more on the device; 0: give them back."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    idle = {name: value for name, value in os.environ.items() if name != "HOLLOW_COMPUTE"}
    with subprocess.Popen([sys.executable, "-S", "-c", NEIGHBOUR], env=idle, **pipes) as process:
        assert process.stdout.readline() == "here\n"

        def more(nbytes):
            print(int(nbytes), file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n"

        yield more
        process.stdin.close()


def free_bytes():
    return torch.cuda.mem_get_info()[0]


def changes_of(session):
    return [(one["reason"], one["from_bytes"], one["to_bytes"]) for one in session.adapting.changes]


def test_a_budget_that_is_too_small_is_raised():
    _, expected = budget_for(mlp, 1.0)
    gc.collect()
    forget()
    budget = beside() + SPACE + 20 * MIB
    peak()
    with dtrrun.budget(budget, device=DEVICE, over_budget="raise", cost="model") as session:
        found = train(mlp)
        report = session.report()
    assert same(expected, found)
    changes = changes_of(session)
    assert 1 <= len(changes) <= 4
    assert all(reason == "too small" and before < now for reason, before, now in changes)
    assert report["footprint_peak_bytes"] <= report["budget_bytes"] == changes[-1][2]
    assert report["over_budget"] == 0
    assert peak() <= report["budget_bytes"]


@pytest.mark.parametrize("operator", [lambda x: x.cumsum_(0), lambda x: x.mul(2.0)])
def test_an_operator_that_cannot_run_again_gets_its_memory(operator):
    with dtrrun.budget(beside() + SPACE + 40 * MIB, device=DEVICE, over_budget="raise") as session:
        x = tensor(32)
        out = operator(x)
        big = tensor(60)
        assert float(out[0]) in (1.0, 2.0)
        assert float(big[-1]) == 1.0
    assert [reason for reason, *_ in changes_of(session)] == ["too small"]


def test_there_is_no_raise_beyond_what_the_device_has(monkeypatch):
    there = beside() + SPACE + 60 * MIB
    with dtrrun.budget(there, device=DEVICE, over_budget="raise") as session:
        x = tensor(16)
        used = torch.cuda.mem_get_info()[1] - free_bytes()
        monkeypatch.setenv("HOLLOW_TOTAL", str(used + 120 * MIB))
        with pytest.raises(dtrrun.BudgetError, match=r"was not raised.*the device has"):
            tensor(400)
        assert float(x[0]) == 1.0
    assert all(now <= used + 120 * MIB for *_, now in changes_of(session))


def test_a_neighbour_grows_and_ends(grow, capfd, monkeypatch):
    monkeypatch.setattr("dtrrun.runtime.adapting.PATIENCE_NS", 0)
    budget, expected = budget_for(mlp, 0.9, steps=7)
    gc.collect()
    forget()
    ended = []

    def grows(*_):
        ended.append(None)
        if len(ended) == 2:
            reserved = torch.cuda.memory_reserved()
            torch.cuda.empty_cache()
            grow(free_bytes() - (reserved - torch.cuda.memory_reserved()) // 2)
        elif len(ended) == 4:
            grow(0)

    with dtrrun.budget(budget, device=DEVICE, over_budget="raise", cost="model") as session:
        hook = register_optimizer_step_post_hook(grows)
        try:
            found = train(mlp, steps=7)
        finally:
            hook.remove()
        report = session.report()
    assert same(expected, found)
    lowered, risen = session.adapting.changes
    assert (lowered["reason"], lowered["step"]) == ("refused", 3)
    assert (risen["reason"], risen["step"] > 4) == ("free", True)
    assert (
        lowered["to_bytes"] < budget == lowered["from_bytes"] == risen["to_bytes"] == report["budget_bytes"]
    )
    assert report["evictions"] > 0
    assert (report["error"], report["warnings"]) == (None, [])
    told = capfd.readouterr().err
    assert told.count("dtrrun: the budget is lowered from ") == 1
    assert told.count(" again: the device has had memory for it for ") == 1
