"""`--over-budget warn`: a budget that is too small costs what the least one that holds the program would."""

import pytest
import torch
from torch import nn

import dtrrun
from tests.conformance.programs import assert_same, outcome, plain

WIDTH, ROWS, LAYERS = 64, 512, 8


def training():
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    optimizer = torch.optim.Adam(net.parameters())
    losses = []
    for _ in range(3):
        loss = net(torch.randn(ROWS, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [*net.parameters()]


def run(budget, over_budget="warn"):
    with dtrrun.budget(budget, "cpu", over_budget=over_budget, cost="model", quiet=True) as session:
        _, found = outcome(training)
        return found, session.report()


@pytest.fixture(scope="module")
def peak():
    return run(None)[1]["peak_bytes"]


@pytest.mark.parametrize("share", [0.05, 0.2, 0.35])
def test_below_what_must_stay_it_goes_on_within_the_least_that_it_needs(share, peak, capsys):
    expected, budget = plain(training), int(share * peak)
    found, report = run(budget)
    assert_same(expected, found, "over the budget")
    assert report["peak_bytes"] < 0.8 * peak
    assert report["exceeded_bytes"] >= report["peak_bytes"] - budget > 0
    assert 0 < report["over_budget"] < 30
    (warning,) = [one["text"] for one in report["warnings"] if "is exceeded by" in one["text"]]
    assert "what must stay and aten." in warning
    assert "which is the limit from now on" in warning
    assert capsys.readouterr().err.count("is exceeded by") <= 12  # while it is found out


def test_a_smaller_budget_does_not_take_more_memory(peak):
    peaks = {share: run(int(share * peak))[1]["peak_bytes"] for share in (0.05, 0.2, 0.35, 0.5, 0.6)}
    least = min(peaks.values())
    assert all(found < max(share * peak, 1.1 * least) for share, found in peaks.items())


def test_evict_goes_on_evicting_all_that_it_can(peak):
    expected = plain(training)
    found, report = run(1, "evict")
    assert_same(expected, found, "with everything evicted")
    assert report["evictions"] > 300
    assert report["rule"] is None or report["over_budget"] > 300
