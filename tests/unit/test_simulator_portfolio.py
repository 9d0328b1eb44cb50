"""dtrrun.simulator.portfolio, and replays that know the previous step."""

from functools import partial

import pytest

from dtrrun.simulator.log import Call
from dtrrun.simulator.portfolio import STARTS, find
from dtrrun.simulator.replay import simulate
from dtrrun.simulator.schedule import schedule_of
from tests.unit.simulator_logs import random_log

FORESEEING = [
    "h_next",
    "h_chain(c=e_star,s=0,next=1,released=alike)",
    "h_chain(c=ancestors,s=0,next=0.5,released=first)",
    "h_chain(c=e_star,s=1,next=1,released=first)",
    "h_chain(c=e_star,s=.5,next=1.5,released=alike)",
    "h_chain(c=ancestors,s=0,next=2,released=alike)",
]


@pytest.mark.parametrize("heuristic", FORESEEING)
@pytest.mark.parametrize("seed", range(8))
def test_with_foresight_too_the_search_and_the_scan_give_the_same_run(seed, heuristic):
    schedule = schedule_of(random_log(200 + seed, 120), "random")
    changed = schedule_of(random_log(200 + seed, 90), "other")
    for previous in (None, changed):
        for share in (0.6, 0.4):
            budget = int(schedule.peak_bytes * share)
            fast, slow = (
                simulate(schedule, budget, heuristic, limit=8, previous=previous, scan=scan)
                for scan in (False, True)
            )
            for field in ("status", "time", "evictions", "rematerializations", "peak_bytes"):
                assert getattr(fast, field) == getattr(slow, field)


def test_a_schedule_is_watched_once():
    schedule = schedule_of(random_log(9, 60), "random")
    assert schedule.step is schedule.step


def test_a_step_that_differs_is_simulated_as_well():
    """If the previous step was of another program, the rule only loses its foresight.

    The other step has other operators, since random programs with the same ones are alike in places.
    """
    schedule = schedule_of(random_log(9, 200), "random")
    others = [one._replace(operator="other") if isinstance(one, Call) else one for one in random_log(77, 200)]
    other = schedule_of(others, "other")
    budget = schedule.peak_bytes // 2
    told = simulate(schedule, budget, "h_next", previous=other)
    plain = simulate(schedule, budget, "h_chain(c=ancestors,s=.2,next=0,released=first)")
    assert told.status == "ok"
    assert told.time == plain.time


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_the_portfolio_is_as_good_as_the_best_of_what_it_starts_with(share):
    schedule = schedule_of(random_log(31, 200), "random")
    budget = int(schedule.peak_bytes * share)
    alone = {name: simulate(schedule, budget, name) for name in STARTS}
    best = min(one.overhead for one in alone.values() if one.status == "ok")
    found = find(partial(simulate, schedule, budget))
    assert found.outcome.status == "ok"
    assert found.outcome.overhead <= best
    assert simulate(schedule, budget, found.heuristic).time == found.outcome.time
    assert found.outcome.peak_bytes <= budget
    assert set(STARTS) <= set(found.tried)


def test_a_budget_that_is_too_small_for_all_is_said_to_be():
    schedule = schedule_of(random_log(31, 200), "random")
    found = find(partial(simulate, schedule, schedule.constant_bytes + 1))
    assert found.outcome.status == "oom"
