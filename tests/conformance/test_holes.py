"""Any budget above the least one that runs also runs: before an error is raised, other ways are tried."""

import pytest
import torch
from torch import nn

import dtrrun
from tests.bench import holes

COUNTS = ("evictions", "rematerializations", "peak_bytes")
MB = 10**6


def layers():
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(128, 128), nn.Tanh())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(2048, 128)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        optimizer.step()
    return [p.tolist() for p in net.parameters()]


def inside(budget):
    with dtrrun.budget(budget, cost="model") as session:
        result = layers()
        report = session.report()
        counts = {name: report[name] for name in COUNTS}
        counts["frugal_runs"] = session.dtr.rematerializer.frugal_runs
    assert report["peak_bytes"] <= budget
    return result, counts


def test_a_larger_budget_runs_where_a_smaller_one_does(monkeypatch):
    """Of 5 to 7 MB, some left too little room for a plan: a target that was in memory stayed there."""
    expected = layers()
    for budget in (5, 5.5, 6):
        result, counts = inside(int(budget * MB))
        assert result == expected, budget
        assert counts["frugal_runs"] > 0, budget


def test_nothing_is_tried_in_another_way_while_the_usual_one_suffices():
    _, counts = inside(7 * MB)
    assert counts["rematerializations"] > 0
    assert counts["frugal_runs"] == 0


@pytest.mark.parametrize("rule", holes.RULES)
@pytest.mark.parametrize("name", holes.MODELS)
def test_no_budget_fails_above_one_that_runs(name, rule):
    found = holes.sweep(name, rule, range(100, 40, -10), failures=1)
    assert found.runs
    assert not found.holes
