"""dtrrun.simulator.replay"""

import math

import pytest

from dtrrun.simulator.log import Call, Constant, Mutate, Release
from dtrrun.simulator.replay import Replay
from dtrrun.simulator.schedule import schedule_of
from tests.unit.simulator_logs import random_log
from tests.unit.simulator_oracle import Oracle


@pytest.mark.parametrize("heuristic", ["h_dtr_local", "lru", "size"])
@pytest.mark.parametrize("seed", range(40))
def test_the_replay_does_what_the_paper_says(seed, heuristic):
    schedule = schedule_of(random_log(seed), "random")
    for share in (1.0, 0.7, 0.5, 0.3):
        budget = int(schedule.peak_bytes * share)
        oracle = Oracle(schedule, budget, heuristic)
        status = "ok"
        try:
            oracle.run()
        except MemoryError:
            status = "oom"
        found = Replay(schedule, budget, heuristic, limit=math.inf, paper_ties=False).run()
        assert found.status == status
        assert (found.time, found.evictions) == (oracle.clock, oracle.evictions)
        if status == "ok":
            assert found.rematerializations == oracle.recomputed
            assert found.peak_bytes <= budget


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "heuristic", ["h_dtr", "h_dtr_eq", "msps", "e_star", "h_chain", "h'(s=no,m=no,c=eqclass)", "lru", "size"]
)
@pytest.mark.parametrize("latest", [False, True])
def test_the_search_and_the_scan_give_the_same_run(seed, heuristic, latest):
    schedule = schedule_of(random_log(100 + seed, 120), "random")
    for share in (0.8, 0.5, 0.35):
        budget = int(schedule.peak_bytes * share)
        fast, slow = (
            Replay(schedule, budget, heuristic, paper_ties=latest, scan=scan, limit=8).run()
            for scan in (False, True)
        )
        for field in ("status", "time", "evictions", "rematerializations", "peak_bytes"):
            assert getattr(fast, field) == getattr(slow, field)


def test_the_random_logs_try_everything():
    """Otherwise the comparisons above would show little."""
    outcomes = [
        Replay(schedule, int(schedule.peak_bytes * share), "h_dtr_local", limit=8).run()
        for schedule in (schedule_of(random_log(seed), "random") for seed in range(40))
        for share in (1.0, 0.7, 0.5, 0.3)
    ]
    completed = [one for one in outcomes if one.status == "ok"]
    assert len(completed) > 40
    assert len(outcomes) - len(completed) > 10
    assert sum(one.rematerializations for one in completed) > 200


def test_without_a_budget_nothing_is_recomputed():
    schedule = schedule_of(random_log(3), "random")
    outcome = Replay(schedule, None, "h_dtr_eq").run()
    assert (outcome.status, outcome.overhead, outcome.rematerializations) == ("ok", 1.0, 0)


def chain(length):
    log = [Constant("x0", 1)]
    log += [Call("op", (f"x{i}",), (f"x{i + 1}",), (1,), (-1,), 1) for i in range(length)]
    return log


def test_a_long_chain_is_rematerialized_without_recursion():
    log = [*chain(5000), *(Release(f"x{i}") for i in range(1, 5000))]
    log.append(Call("op", ("x5000",), ("y",), (1,), (-1,), 1))
    log.append(Mutate("op_", ("x5000",), (0,), 1))
    schedule = schedule_of(log, "chain")
    outcome = Replay(schedule, 4, "lru", limit=math.inf).run()
    assert outcome.status == "ok"
    assert outcome.peak_bytes <= 4


def test_what_recomputes_more_than_the_limit_is_said_to_thrash():
    schedule = schedule_of(
        [*chain(200), *(Call("op", (f"x{i}",), (f"y{i}",), (1,), (-1,), 1) for i in range(200, 0, -1))],
        "chain",
    )
    outcome = Replay(schedule, 204, "lru", limit=1.01).run()
    assert outcome.status == "thrash"
    assert Replay(schedule, 202, "lru", limit=math.inf).run().status == "oom"


def test_the_observer_sees_every_storage_come_and_go():
    schedule = schedule_of(random_log(5), "random")
    seen = []
    replay = Replay(
        schedule,
        schedule.peak_bytes // 2,
        "h_dtr",
        limit=math.inf,
        observer=lambda what, number: seen.append((what, number)),
    )
    outcome = replay.run()
    come = sum(schedule.nbytes[number] for what, number in seen if what == "compute")
    gone = sum(schedule.nbytes[number] for what, number in seen if what == "evict")
    assert come - gone == replay.core.memory
    ran = [number for what, number in seen if what == "run"]
    assert set(ran) == set(range(len(schedule.operators)))
    assert len(ran) == len(schedule.operators) + outcome.rematerializations
    assert sum(what == "evict" for what, _ in seen) == outcome.evictions
    released = sum(event < 0 for event in schedule.events)
    assert outcome.evictions - released <= outcome.chosen < outcome.evictions
