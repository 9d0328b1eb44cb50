"""Room in the budget for operators that several threads run at once."""

import threading
import time

import pytest
import torch

import dtrrun

UNIT = 1024 * 1024


@pytest.fixture
def meet():
    """An operator that makes a megabyte once the other announced ones are about to do so, too."""
    barrier = [threading.Barrier(1)]
    with torch.library._scoped_library("dtrrun_test_room", "FRAGMENT") as library:
        library.define("meet(Tensor x) -> Tensor")

        def made(x):
            barrier[0].wait(20)
            return torch.zeros(UNIT // 4) + x

        library.impl("meet", made, "CPU")
        library.impl("meet", lambda x: x.new_empty(UNIT // 4), "Meta")
        yield barrier, torch.ops.dtrrun_test_room.meet.default


def in_threads(count, work):
    errors = []

    def run(place):
        try:
            work(place)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_what_one_has_been_promised_is_not_anothers_room(meet):
    barrier, operator = meet
    results, taken = {}, []
    with dtrrun.budget(6 * UNIT + UNIT // 2) as session:
        one, ledger = torch.ones(1), session.ledger
        kept = [torch.full((UNIT // 4,), place + 1.0) for place in range(5)]
        barrier[0] = threading.Barrier(2, lambda: taken.append(ledger.resident_bytes + ledger.reserved_bytes))
        errors = in_threads(2, lambda place: results.update({place: operator(one)}))
        assert errors == []
        assert 2 * UNIT < taken[0] <= 6 * UNIT + UNIT // 2
        assert session.report()["peak_bytes"] <= 6 * UNIT + UNIT // 2
        assert session.report()["evictions"] == 1
        assert session.ledger.reserved_bytes == 0
    assert [tensor[0].item() for tensor in kept] == [1, 2, 3, 4, 5]


def test_who_finds_no_room_waits_for_the_others(meet):
    """What an operator of another thread has locked can be evicted once that operator has ended."""
    barrier, operator = meet
    under_way, results = threading.Event(), []

    class Announced(threading.Barrier):
        def wait(self, timeout=None):
            under_way.set()
            return threading.Event().wait(0.2)

    with dtrrun.budget(3 * UNIT + UNIT // 2) as session:
        big = torch.full((2 * UNIT // 4,), 1.0)
        barrier[0] = Announced(1)

        def work(place):
            if place:
                under_way.wait(20)
                results.append(torch.full((2 * UNIT // 4,), 2.0))
            else:
                operator(big[:1])

        assert in_threads(2, work) == []
        assert session.report()["peak_bytes"] <= 3 * UNIT + UNIT // 2
    assert results[0].sum().item() == 2 * len(results[0])


def while_under_way(barrier, work, during):
    """Run `during` here, while another thread is inside `meet` in `work`."""
    under_way, may_end = threading.Event(), threading.Event()

    class Announced(threading.Barrier):
        def wait(self, timeout=None):
            under_way.set()
            return may_end.wait(20)

    barrier[0] = Announced(1)
    thread = threading.Thread(target=work)
    thread.start()
    assert under_way.wait(20)
    try:
        during()
    finally:
        may_end.set()
        thread.join()


def test_room_that_another_has_been_promised_is_none(meet):
    barrier, operator = meet
    with dtrrun.budget(4 * UNIT + UNIT // 2) as session:
        one, results, ledger, taken = torch.ones(1), [], session.ledger, []
        assert in_threads(1, lambda _: one + 1) == []
        kept = [torch.full((UNIT // 4,), place + 1.0) for place in range(3)]
        before = dict(session.interposer.python_calls)

        def during():
            kept.append(torch.full((UNIT // 4,), 4.0))
            taken.append(ledger.resident_bytes + ledger.reserved_bytes)

        while_under_way(barrier, lambda: results.append(operator(one)), during)
        assert 4 * UNIT < taken[0] <= 4 * UNIT + UNIT // 2
        assert session.interposer.python_calls.get("aten.full") == before.get("aten.full")
        assert session.report()["peak_bytes"] <= 4 * UNIT + UNIT // 2
        assert session.report()["evictions"] == 1
    assert [tensor[0].item() for tensor in kept] == [1, 2, 3, 4]


def test_who_waits_in_vain_for_the_others_gets_a_larger_budget(meet, monkeypatch):
    monkeypatch.setattr("dtrrun.runtime.dispatch.callbacks.PATIENCE_SECONDS", 0.05)
    barrier, operator = meet
    with dtrrun.budget(4 * UNIT + UNIT // 2, over_budget="raise") as session:
        one, kept = torch.ones(1), []
        assert in_threads(1, lambda _: one + 1) == []
        while_under_way(
            barrier,
            lambda: kept.append(operator(one)),
            lambda: kept.append(torch.full((UNIT,), 4.0)),
        )
        (change,) = session.report()["budget_changes"]
        assert 4 * UNIT + UNIT // 2 < change["least_bytes"] < change["to_bytes"] < 7 * UNIT
        assert session.report()["peak_bytes"] <= change["to_bytes"]


def test_who_ends_during_a_collection_has_let_go_of_its_room(meet, monkeypatch):
    barrier, operator = meet
    with dtrrun.budget(4 * UNIT + UNIT // 2) as session:
        assert in_threads(1, lambda _: torch.ones(1) + 1) == []
        held, results, collections = torch.full((3 * UNIT // 4,), 2.0), [], []
        barrier[0] = threading.Barrier(2)
        thread = threading.Thread(target=lambda: results.append(operator(held[:1])))

        def collect(*generation):
            collections.append(generation)
            if thread.is_alive():
                barrier[0].wait(20)
                thread.join()

        monkeypatch.setattr("gc.collect", collect)
        thread.start()
        while not session.ledger.reserved_bytes:
            time.sleep(1e-3)
        other = torch.full((3 * UNIT // 4,), 3.0)  # only if `held` is evicted
        assert collections
        assert session.report()["peak_bytes"] <= 4 * UNIT + UNIT // 2
    assert (other[0], held[0], results[0][0]) == (3, 2, 2)


def test_what_another_thread_uses_stays_when_it_is_written_to(meet):
    barrier, operator = meet
    with dtrrun.budget("1GB") as session:
        assert in_threads(1, lambda _: torch.ones(1) + 1) == []
        written = [torch.full((UNIT // 4,), 1.0).add_(1) for _ in range(3)][-1]
        evicted = []

        def during():
            written.add_(1)
            evicted.append(session.dtr.eviction.evict_if_possible(session.callbacks.version_of(written)))

        while_under_way(barrier, lambda: operator(written[:1]), during)
    assert evicted == [False]
    assert written.sum() == 3 * UNIT // 4


def test_a_kernel_keeps_its_room_and_tells_when_it_has_ended(monkeypatch):
    """A thread that waits for room is notified: no room is free before the kernel ends."""
    monkeypatch.setattr("dtrrun.runtime.dispatch.callbacks.PATIENCE_SECONDS", 5.0)
    side = 512
    each = 4 * side * side
    seen = []
    with dtrrun.budget(13 * each // 4) as session:
        assert in_threads(1, lambda _: torch.ones(1) + 1) == []
        torch.full((side, side), 0.5) @ torch.full((side, side), 0.5)
        for _ in range(100):  # the kernel may have ended before this thread looks
            factor = torch.full((side, side), 0.5)
            thread = threading.Thread(target=torch.mm, args=(factor, factor))
            thread.start()
            while thread.is_alive() and not seen:
                with session.callbacks.lock:  # the kernel's thread needs it to return its room
                    if session.ledger.reserved_bytes:
                        seen.append(session.ledger.reserved_bytes)
                        other = torch.full((2 * side, side), 2.0)  # waits
                time.sleep(1e-4)
            thread.join()
            del factor
            if seen:
                break
        assert seen == [each]
        assert session.report()["peak_bytes"] <= 13 * each // 4
    assert other.sum() == 4 * side * side


def test_threads_of_torchscript_take_no_short_cut():
    @torch.jit.script
    def twice(a: torch.Tensor, b: torch.Tensor):
        other = torch.jit.fork(torch.matmul, a, b)
        return torch.tanh(a) + torch.jit.wait(other)

    with dtrrun.budget("1GB") as session:
        x = torch.ones(8, 8)
        torch.tanh(x)
        assert not session.callbacks.shared
        twice(x, x)  # the thread's operator is the first of its kind: a known one would not ask
        assert session.callbacks.shared


def test_who_finds_no_room_when_nobody_else_is_at_work_is_told():
    with dtrrun.budget(2 * UNIT):
        assert in_threads(1, lambda _: torch.ones(1) + 1) == []
        with pytest.raises(dtrrun.BudgetError, match="budget"):
            torch.full((UNIT,), 1.0)
