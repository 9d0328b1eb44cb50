"""dtrrun.runtime.cuda.graphs, on a fake GPU: the patched methods are called as a capture would call them."""

import pytest
import torch
from fake_gpu import fake_session, tensor

import dtrrun
from dtrrun.runtime.cuda.budget import LEAST_GUARD, MIB

BUDGET = 300 * MIB + LEAST_GUARD + 16 * MIB


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    captured = False

    def capture_begin(self, pool=None):
        self.captured = True

    def capture_end(self):
        self.captured = False


@pytest.fixture(autouse=True)
def graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    begin = Graph.capture_begin
    yield Graph()
    assert Graph.capture_begin is begin, "the patch is still there"


def test_nothing_is_evicted_while_a_graph_is_captured(monkeypatch, capsys, graph):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        static = tensor()
        other = [tensor().mul(2.0) for _ in range(3)]
        graph.capture_begin(pool=None)
        gpu.side = True
        gpu.allocator.cap = None  # a graph has its own memory pool
        evictions = session.report()["evictions"]
        kept = [static]
        for _ in range(30):
            kept.append(kept[-1].mul(2.0))
        assert session.report()["evictions"] == evictions
        gpu.side = False
        graph.capture_end()
        records = [session.callbacks.version_of(one) for one in kept]
        assert {record.pin for record in records} == {"CUDA graph"}
        assert all(record.escaped and record.resident for record in records)
        assert all(session.callbacks.version_of(one).pin != "CUDA graph" for one in other)
        del kept, records
        more = [tensor().mul(2.0) for _ in range(30)]
        assert session.report()["evictions"] > evictions
        assert all(one[0, 0] == 2 for one in more)
        assert session.callbacks.version_of(static).resident
    assert capsys.readouterr().err.count("CUDA graph") == 1


def test_what_was_evicted_comes_back_before_a_capture(monkeypatch, graph):
    with fake_session(monkeypatch, BUDGET) as (session, _):
        first = tensor().mul(2.0)
        fill = [tensor().mul(2.0) for _ in range(20)]
        assert not session.callbacks.version_of(first).resident
        del fill
        graph.capture_begin()
        assert session.callbacks.version_of(first).resident
        graph.capture_end()


def test_a_capture_that_reads_what_does_not_fit_is_a_budget_error(monkeypatch, graph):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = [tensor().mul(2.0) for _ in range(30)]
        graph.capture_begin()
        gpu.side = True
        evicted = next(one for one in kept if not session.callbacks.version_of(one).resident)
        with pytest.raises(dtrrun.BudgetError, match="CUDA graph"):
            evicted.add(1.0)
        gpu.side = False
        graph.capture_end()
        assert all(one[0, 0] == 2 for one in kept)


def test_a_capture_that_gets_no_memory_is_a_budget_error(monkeypatch, graph):
    with fake_session(monkeypatch, BUDGET):
        kept = [tensor().mul(2.0) for _ in range(8)]
        graph.capture_begin()
        with pytest.raises(dtrrun.BudgetError, match="While a CUDA graph is captured") as caught:
            kept += (kept[0].mul(1.0) for _ in range(1000))
        graph.capture_end()
        assert caught.value.least_budget_bytes > BUDGET
        assert all(one[0, 0] == 2 for one in kept)


def test_a_capture_exceeds_a_budget_that_only_warns(monkeypatch, graph):
    with fake_session(monkeypatch, BUDGET, over_budget="warn") as (_, gpu):
        kept, cap = [tensor().mul(2.0) for _ in range(8)], gpu.allocator.cap
        graph.capture_begin()
        kept += [kept[0].mul(1.0) for _ in range(30)]
        graph.capture_end()
        assert gpu.allocator.reserved > cap == gpu.allocator.cap
        assert all(one[0, 0] == 2 for one in kept)


def test_what_was_computed_from_a_captured_constant_is_rescued(monkeypatch, graph):
    static = tensor()  # older than the session
    with fake_session(monkeypatch, BUDGET) as (session, _):
        early = static.mul(2.0)
        fill = [tensor().mul(2.0) for _ in range(20)]
        del fill
        graph.capture_begin()
        static.sum()
        graph.capture_end()
        torch._C.TensorBase.untyped_storage(static).fill_(0)  # written unseen, as by the graph's replay
        assert session.callbacks.version_of(early).operation is None
        more = [tensor().mul(2.0) for _ in range(20)]
        assert session.callbacks.version_of(early).resident
        del more
        assert early[0, 0] == 2
        assert static.mul(3.0)[0, 0] == 0


def test_random_operators_ask_no_generator(monkeypatch, graph):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        x = tensor()
        graph.capture_begin()
        gpu.side = True
        monkeypatch.setattr(session.interposer, "capture", None)
        torch.nn.functional.dropout(x)
        gpu.side = False
        graph.capture_end()


def test_a_capture_that_does_not_begin(monkeypatch, graph):
    monkeypatch.setattr(Graph, "capture_begin", lambda self: 1 / 0)
    with fake_session(monkeypatch, BUDGET) as (session, _):
        tensor()
        limit = session.ledger.limit
        with pytest.raises(ZeroDivisionError):
            graph.capture_begin()
        assert not session.device.capturing
        assert session.ledger.limit <= limit
    monkeypatch.undo()
