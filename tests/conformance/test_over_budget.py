"""`--over-budget warn` and `raise`: a budget that is too small costs what the least that suffices would."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import dtrrun
from dtrrun.runtime import device
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


@pytest.mark.parametrize("share", [0.02, 0.35])
@pytest.mark.parametrize("threads", [False, True])
def test_a_budget_is_raised_a_few_times_and_kept(share, threads, peak):
    expected, budget = plain(training), int(share * peak)
    with dtrrun.budget(budget, "cpu", over_budget="raise", cost="model", quiet=True) as session:
        _, found = outcome(in_a_thread if threads else training)
        report = session.report()
    assert_same(expected, found, "in a raised budget")
    changes = report["budget_changes"]
    assert 1 <= len(changes) <= 5
    for one, before in zip(changes, [{"to_bytes": budget}, *changes], strict=False):
        assert one["from_bytes"] == before["to_bytes"] < one["least_bytes"] < one["to_bytes"]
    assert report["peak_bytes"] <= changes[-1]["to_bytes"] == report["budget_bytes"] < 0.8 * peak
    assert (report["over_budget"], report["error"]) == (0, None)


def in_a_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(training).result()


def test_there_is_no_raise_beyond_what_the_machine_has(peak, monkeypatch):
    monkeypatch.setattr(device, "memory_left", lambda: peak // 20)
    with dtrrun.budget(int(0.3 * peak), "cpu", over_budget="raise", cost="model") as session:
        weights = torch.nn.Linear(WIDTH, WIDTH)
        with pytest.raises(dtrrun.BudgetError, match=r"was not raised.*this machine has"):
            torch.nn.Linear(1000, peak // 5000)
        assert session.report()["budget_changes"] == []
        with torch.no_grad():
            weights(torch.ones(1, WIDTH))


def test_what_only_might_be_brought_back_is_not_worth_a_raise(peak):
    with dtrrun.budget(int(0.5 * peak), "cpu", over_budget="raise", cost="model") as session:
        kept = [torch.ones(peak // 40) * 2]
        for _ in range(10):
            kept.append(kept[-1] * 2)
        session.dtr.rematerializer.restore_all()
        assert session.report()["budget_changes"] == []
        assert session.report()["evictions"] > 0
