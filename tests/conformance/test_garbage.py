"""Garbage: tensors held only by reference cycles do not take memory that the program needs."""

import gc

import pytest
import torch
from torch import nn

import dtrrun
from tests.conformance.programs import assert_same, outcome, plain

ROWS, WIDTH = 256, 128
RECORD = ROWS * WIDTH * 4


class Record:
    """Refers to itself."""

    def __init__(self, **values):
        self.me = self
        vars(self).update(values)


@pytest.fixture(autouse=True)
def no_automatic_collections():
    """The collector does not run by itself for a long time in a program that makes few objects."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)
    yield
    gc.set_threshold(*before)


def training(steps=24):
    """Train; every step leaves a cyclic record with a result that depends on the weights."""
    net = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        record = Record(out=net(torch.randn(ROWS, WIDTH)))
        loss = record.out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net


def counted(monkeypatch):
    """Return a list that collects the calls by which sessions collect garbage."""
    made = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda *given: made.append(given) or collect(*given))
    return made


def test_a_program_with_cycles_runs_in_what_its_live_tensors_need():
    expected = plain(training)
    with dtrrun.budget(10 * RECORD) as session:
        _, found = outcome(training)
    assert_same(expected, found, "with cycles")
    assert session.report()["peak_bytes"] <= 10 * RECORD


def test_evicted_garbage_is_not_brought_back_because_a_weight_changes():
    with dtrrun.budget(100 * RECORD) as session:
        net = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(4):
            Record(out=net(torch.randn(ROWS, WIDTH)), more=net(torch.randn(ROWS, WIDTH)))
        net(torch.randn(ROWS, WIDTH)).mean().backward()
        session.set_budget(5 * RECORD)
        assert session.report()["evicted_bytes"]
        optimizer.step()
        report = session.report()
        assert "input mutated" not in session.dtr.eviction.pinned_by_reason()
    assert report["rematerializations"] == 0


def test_a_refusal_soon_after_a_collection_that_freed_nothing_is_preceded_by_another():
    """This happens in a search for the largest batch that fits."""
    with dtrrun.budget(6 * RECORD) as session:
        with pytest.raises(dtrrun.BudgetError):
            torch.randn(20 * ROWS, WIDTH)
        for _ in range(3):
            record = Record(out=torch.randn(5 * ROWS, WIDTH))
            session.pin(record.out)
            del record
        assert session.report()["peak_bytes"] <= 6 * RECORD


def test_memory_that_is_refused_while_inputs_are_brought_back_is_garbage_s():
    """Both inputs and the result need the whole budget, part of which is garbage that cannot be evicted."""
    with dtrrun.budget(20 * RECORD) as session:
        one = torch.randn(ROWS, WIDTH)
        left, right = one.sin(), one.cos()
        expected = (left * right).sum().item()
        with pytest.raises(dtrrun.BudgetError):
            torch.randn(21 * ROWS, WIDTH)  # follows a collection that frees nothing
        for _ in range(3):
            record = Record(out=one.exp())
            session.pin(record.out)
            del record
        session.set_budget(5 * RECORD)
        assert (left * right).sum().item() == expected


def test_programs_without_cycles_hardly_ever_pay(monkeypatch):
    made = counted(monkeypatch)
    with dtrrun.budget(460_000, cost="model") as session:
        layers = [nn.Linear(64, 64) for _ in range(12)]
        net = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        old = []
        for _ in range(40):
            optimizer.zero_grad()
            out = net(torch.randn(64, 64))
            old = [out.detach().exp(), *old[:1]]  # depends on weights that change while it still exists
            out.square().mean().backward()
            optimizer.step()
        report = session.report()
    assert report["rematerializations"] > 50
    assert len(made) <= 4


def test_a_collector_that_is_switched_off_stays_so_while_there_is_room(monkeypatch):
    made = counted(monkeypatch)
    monkeypatch.setattr("dtrrun.core.garbage.FIRST_NS", 0)
    gc.disable()
    try:
        with dtrrun.budget(3 * RECORD):
            one = torch.randn(ROWS, WIDTH)
            kept = [one + i for i in range(6)]
            [one.sum() for one in kept]
    finally:
        gc.enable()
    assert not made


def test_finalizers_read_what_was_evicted(monkeypatch):
    monkeypatch.setattr("dtrrun.core.garbage.FIRST_NS", 0)
    read = []

    class Finalized(Record):
        def __del__(self):
            read.append(self.tensor.sum().item())

    with dtrrun.budget(4 * RECORD) as session:
        base = torch.ones(ROWS, WIDTH)
        for i in range(12):
            Finalized(tensor=base + i)
        kept = [base.sin() for _ in range(12)]
        [one.sum() for one in kept]
        assert read
        gc.collect()
        assert session.report()["rematerializations"]
    assert sorted(read) == [float(ROWS * WIDTH * (1 + i)) for i in range(12)]
