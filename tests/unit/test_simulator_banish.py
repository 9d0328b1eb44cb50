"""dtrrun.simulator.replay: storages that are banished, and deallocations that are ignored."""

import math
from typing import NamedTuple

import pytest

from dtrrun.simulator.log import Call, Constant, Release
from dtrrun.simulator.replay import Replay, simulate
from dtrrun.simulator.schedule import schedule_of
from tests.unit.simulator_logs import random_log
from tests.unit.simulator_oracle import Oracle

SHARES = (1.0, 0.7, 0.5, 0.35)
SEEDS = range(25)


@pytest.mark.parametrize("deallocation", ["banish", "ignore"])
@pytest.mark.parametrize("heuristic", ["h_dtr_local", "lru", "size"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_replay_does_what_the_paper_says(seed, heuristic, deallocation):
    schedule = schedule_of(random_log(seed, 40), "random")
    for share in SHARES:
        budget = int(schedule.peak_bytes * share)
        oracle = Oracle(schedule, budget, heuristic, deallocation)
        status = "ok"
        try:
            oracle.run()
        except MemoryError:
            status = "oom"
        found = simulate(
            schedule, budget, heuristic, deallocation=deallocation, paper_ties=False, limit=math.inf
        )
        assert found.status == status
        assert (found.time, found.evictions) == (oracle.clock, oracle.evictions)
        if status == "ok":
            assert found.rematerializations == oracle.recomputed
            assert found.peak_bytes <= budget


def test_the_random_logs_try_everything():
    """Otherwise the comparison above would show little."""
    waited = pinned = oom = again = constants = 0
    for seed in SEEDS:
        schedule = schedule_of(random_log(seed, 40), "random")
        for share in SHARES:
            replay = Replay(
                schedule,
                int(schedule.peak_bytes * share),
                "lru",
                deallocation="banish",
                paper_ties=False,
                limit=math.inf,
            )
            core, status = replay.core, "ok"
            for event in schedule.events:
                if event >= 0:
                    status = core.call(event)
                else:
                    core.release(~event)
                    waited += State(*core.state(~event)).waits
                if status != "ok":
                    break
            oom += status == "oom"
            again += core.rematerializations
            states = [State(*core.state(number)) for number in range(len(schedule.nbytes))]
            pinned += sum(state.banished and state.pinned for state in states)
            constants += sum(states[number].banished for number in schedule.constants)
    assert min(oom, waited, again, pinned, constants) > 20, (oom, waited, again, pinned, constants)


class State(NamedTuple):
    resident: bool
    pinned: bool
    waits: bool
    banished: bool


@pytest.mark.parametrize("heuristic", ["h_dtr", "h_dtr_eq", "msps", "e_star", "h_chain"])
@pytest.mark.parametrize("deallocation", ["banish", "ignore"])
def test_the_search_and_the_scan_give_the_same_run(heuristic, deallocation):
    for seed in range(8):
        schedule = schedule_of(random_log(100 + seed, 100), "random")
        for share in SHARES:
            budget = int(schedule.peak_bytes * share)
            fast, slow = (
                simulate(schedule, budget, heuristic, deallocation=deallocation, limit=8, scan=scan)
                for scan in (False, True)
            )
            for field in ("status", "time", "evictions", "rematerializations", "peak_bytes"):
                assert getattr(fast, field) == getattr(slow, field)


LOG = [
    Constant("w", 4),
    Call("f", ("w",), ("a",), (4,), (-1,), 1),
    Call("f", ("a",), ("b",), (4,), (-1,), 1),
    Release("w"),
    Release("a"),
    Call("f", ("b",), ("c",), (4,), (-1,), 1),
]


def test_constants_are_banished_and_what_was_computed_from_them_stays():
    schedule = schedule_of(LOG, "banished")
    replay = Replay(schedule, None, "lru", deallocation="banish")
    assert replay.run().status == "ok"
    w, a, b, c = (State(*replay.core.state(number)) for number in range(4))
    assert [one.banished for one in (w, a, b, c)] == [True, True, False, False]
    assert (a.pinned, b.pinned) == (True, True)
    assert replay.core.memory == 8
    eager = Replay(schedule, None, "lru")
    eager.run()
    assert eager.core.memory == 12  # a constant can never be evicted


def test_ignored_deallocations_leave_everything_evictable():
    schedule = schedule_of(LOG, "ignored")
    assert simulate(schedule, None, deallocation="ignore").peak_bytes == 16
    assert simulate(schedule, 12, "lru", deallocation="ignore").evictions == 1
