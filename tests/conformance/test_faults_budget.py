"""The budget is changed while the program runs: up, down, and to less than what is pinned."""

import pytest
import torch
from faults import check_accounts
from programs import assert_same, bits, mlp
from torch import nn

import dtrrun
from tests.care import budget


def trained(change):
    """Four steps; `change(step, where)` is called at the start, before backward, and before the optimizer."""
    torch.manual_seed(5)
    model = mlp(5, 32, lambda: nn.BatchNorm1d(32), lambda: nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    kept = []
    for step in range(4):
        change(step, "start")
        x = torch.randn(64, 32)
        hidden = model[:8](x)
        change(step, "forward")
        loss = model[8:](hidden).square().mean()
        optimizer.zero_grad()
        change(step, "backward")
        loss.backward()
        change(step, "optimizer")
        optimizer.step()
        kept += [hidden.detach(), loss]
    return kept, model, optimizer, torch.get_rng_state()


@pytest.mark.parametrize("careful", [False, True], ids=["plain", "careful"])
def test_a_budget_that_goes_up_and_down(careful):
    expected = bits(trained(lambda step, where: None))
    peaks = []

    def change(step, where):
        number = step * 4 + ["start", "forward", "backward", "optimizer"].index(where)
        if number % 3 == 2:
            session.set_budget(None)
        else:
            budget_bytes = session.report()["resident_bytes"] * (2 if number % 3 else 1)
            session.set_budget(max(budget_bytes, 160_000))
            assert session.report()["resident_bytes"] <= session.ledger.limit
        peaks.append(session.report()["evictions"])

    with budget(200_000, careful=careful, verify=True, over_budget="evict") as session:
        result = trained(change)
        check_accounts(session)
        inside = bits(result)
    assert_same(expected, inside, "inside")
    assert_same(expected, bits(result), "afterwards")
    assert peaks[-1] > peaks[0]
    assert session.report()["mismatches"] == []


@pytest.mark.parametrize("where", ["start", "forward", "backward", "optimizer"])
def test_a_budget_that_is_too_small_and_then_is_not(where):
    """`set_budget` itself raises; what it evicted before comes back, and the program continues."""
    expected = bits(trained(lambda step, where: None))

    def change(step, here):
        if here == where:
            with pytest.raises(dtrrun.BudgetError) as caught:
                session.set_budget(1000)
            assert caught.value.operator == "set_budget"
            assert caught.value.budget_bytes == 1000
            check_accounts(session)
            session.set_budget(400_000)

    with dtrrun.budget(400_000, verify=True) as session:
        result = trained(change)
        check_accounts(session)
    assert_same(expected, bits(result), "afterwards")
    assert session.report()["evictions"] > 0
    assert session.report()["mismatches"] == []


def test_a_first_budget_after_counting_only():
    """Signatures learned without a budget have no output sizes, and must not be relied on."""
    expected = bits(trained(lambda step, where: None))

    def change(step, where):
        if (step, where) == (1, "start"):
            session.set_budget(120_000)

    with dtrrun.budget(None, cost="model") as session:
        result = trained(change)
        report = session.report()
    assert_same(expected, bits(result), "afterwards")
    assert report["evictions"] > 0
    assert report["resident_bytes"] <= 120_000
