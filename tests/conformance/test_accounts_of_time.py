"""The accounts of where a run's time goes are kept up to date while it is being spent."""

import time

import pytest
import torch
from programs import chain

import dtrrun
from dtrrun.runtime import shapes
from dtrrun.runtime.observe.training_memory import Training


def test_a_replay_under_way_is_bookkeeping(monkeypatch):
    """Here, 10 ms of it for each operator."""
    with dtrrun.budget(1, over_budget="evict") as session:
        kept = chain(torch.ones(64), 16)
        before, told = session.times(), []

        def tick():
            told.append(session.times())
            time.sleep(0.01)

        monkeypatch.setattr(session.callbacks, "next_tick", 0)
        monkeypatch.setattr(session, "_tick", tick)
        kept[-2] + 1
        after = session.times()
    assert len(told) > 4
    for earlier, later in zip((before, *told), (*told, after), strict=True):
        assert later["bookkeeping_ns"] >= earlier["bookkeeping_ns"]
    spent = told[-1]["bookkeeping_ns"] - before["bookkeeping_ns"]
    assert spent >= 0.01e9 * (len(told) - 1)
    assert after["bookkeeping_ns"] - before["bookkeeping_ns"] <= after["wall_ns"] - before["wall_ns"]
    assert session.dtr.rematerializer.under_way_ns() == 0


def test_a_native_replay_under_way_is_bookkeeping(monkeypatch):
    told = []
    with dtrrun.budget(1, over_budget="evict") as session:
        kept = chain(torch.ones(64), 16)
        monkeypatch.setattr(session.callbacks, "next_tick", 0)
        monkeypatch.setattr(session, "_tick", lambda: told.append(session.dtr.rematerializer.under_way_ns()))
        kept[-2] + 1
        assert max(told) > 0
        assert session.dtr.rematerializer.under_way_ns() == 0


LOADING_NS = 400_000_000  # more than the rest takes, on a busy machine, too


def test_the_time_of_an_operator_that_finds_no_room_is_accounted_for(monkeypatch):
    """PyTorch's time for loading is not bookkeeping; it used to be deducted though it was never added."""

    def loads(*args):
        time.sleep(LOADING_NS / 1e9)
        monkeypatch.setattr(shapes, "loading_ns", shapes.loading_ns + LOADING_NS)
        return 4_000_000

    with dtrrun.budget("1MB") as session:
        monkeypatch.setattr(shapes, "predict", loads)
        session.dtr.eviction._next_collection = 1000  # a collection would take longer than everything else
        found = Training([], [], False, "cpu")
        monkeypatch.setattr("dtrrun.runtime.session.find_training", lambda device_type: found)  # this, too
        with pytest.raises(dtrrun.BudgetError):
            torch.ones(1_000_000)
        assert 0 <= session.times()["bookkeeping_ns"] < LOADING_NS
