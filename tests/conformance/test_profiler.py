"""PyTorch's profiler: what runs again is in ranges that say so, and the rest is what a plain run shows."""

from collections import Counter

import torch
from programs import assert_same, bits, chain
from torch.profiler import ProfilerActivity, profile

from tests.care import budget

RANGE = "dtrrun: rematerialization"


def parents(event):
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event.name


def profiled():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        x = torch.linspace(0, 1, 4096).requires_grad_()
        kept = chain(x, 10)
        sum(kept).sum().backward()
    own = Counter(one.name for one in profiler.events() if RANGE not in (one.name, *parents(one)))
    return [kept, x.grad], own, {one.key: one.count for one in profiler.key_averages()}


def test_what_runs_again_is_marked():
    expected, own, counts = profiled()
    with budget(100_000, careful=False) as session:
        found, own_inside, counts_inside = profiled()
        assert session.report()["rematerializations"] > 0
    assert_same(bits(expected), bits(found), "inside a profiler")
    assert RANGE not in counts
    assert counts_inside[RANGE] > 0
    assert counts_inside["aten::sin"] > counts["aten::sin"] == own["aten::sin"]
    names = ("aten::sin", "aten::mul", "aten::add", "aten::cos", "aten::linspace")
    assert {name: own_inside[name] for name in names} == {name: own[name] for name in names}
