"""Chains of ten thousand operators, evicted entirely: read from the end, and differentiated."""

import pytest
import torch
from faults import check_accounts
from programs import assert_same, bits

import dtrrun

LENGTH = 10_000
BYTES = 16 * 16 * 4


def long_chain(x):
    for step in range(LENGTH // 2):
        x = x * (1.0001 if step % 2 else 0.9999)
        x = torch.sin(x)
    return x


def evict_all(session):
    """Evict everything that can be evicted, however expensive to recompute."""
    ledger = session.ledger
    ledger.collect_dead()
    evicted = 0
    for record in list(ledger.versions.values()):
        evicted += session.dtr.eviction.evict_if_possible(record)
    return evicted


@pytest.mark.parametrize("kept", [False, True], ids=["end alone", "all activations"])
def test_read_from_the_end(kept):
    expected = bits(long_chain(torch.ones(16, 16)))
    budget_bytes = 2 * LENGTH * BYTES if kept else 200 * BYTES
    with dtrrun.budget(budget_bytes, over_budget="evict", cost="model") as session:
        x = torch.ones(16, 16)
        activations = []
        for step in range(LENGTH // 2):
            x = x * (1.0001 if step % 2 else 0.9999)
            activations.append(x)
            x = torch.sin(x)
            activations.append(x)
            if not kept:
                activations.clear()
        before = session.report()["evictions"]
        assert evict_all(session) >= (LENGTH if kept else 1)
        if kept:
            session.set_budget(200 * BYTES)
        session.ledger.step_peak_bytes = session.ledger.peak_bytes = session.ledger.resident_bytes
        found = bits(x)
        report = session.report()
        check_accounts(session)
        activations.clear()
        assert report["evictions"] > before
        assert report["rematerializations"] >= LENGTH - 200
        assert report["peak_bytes"] <= 200 * BYTES
    assert_same(expected, found, "read from the end")


def test_backward_through_it():
    """Each backward step needs an activation at the end of a long chain, and gets it in bounded memory."""

    def program(between=lambda: None):
        weight = torch.linspace(0.5, 1.0, 256).reshape(16, 16).requires_grad_()
        y = long_chain(weight * 1.0)
        between()
        (y * y).sum().backward()
        return y, weight.grad

    expected = bits(program())
    with dtrrun.budget(2 * LENGTH * BYTES) as session:

        def between():
            assert evict_all(session) >= LENGTH // 2
            session.set_budget(1000 * BYTES)
            session.ledger.step_peak_bytes = session.ledger.peak_bytes = session.ledger.resident_bytes

        result = program(between)
        report = session.report()
        check_accounts(session)
    assert_same(expected, bits(result), "after the backward pass")
    assert report["peak_bytes"] <= 1000 * BYTES
    assert LENGTH / 2 <= report["rematerializations"] <= 40 * LENGTH
