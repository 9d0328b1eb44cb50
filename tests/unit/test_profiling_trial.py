"""dtrrun.profiling.trial"""

import pytest
from fake_records import snapshot

from dtrrun.launch.captured import Captured
from dtrrun.profiling.trial import judged, slowdown

STOPPED = {"text": "step 2 takes 4.0 times as long as its own work: stopped (--on-thrash stop)", "count": 1}


def step(index, wall, remat=0, bookkeeping=0, **counts):
    names = ("wall_ns", "operators_ns", "rematerialization_ns", "scoring_ns", "search_ns", "bookkeeping_ns")
    times = dict.fromkeys(names, 0) | {
        "wall_ns": wall,
        "rematerialization_ns": remat,
        "bookkeeping_ns": bookkeeping,
    }
    return {"index": index, "evictions": 2, "rematerializations": 3, **times, **counts}


def ended(returncode=0, timed_out=False):
    return Captured(returncode, 1.5, "the end", timed_out)


STEPS = [step(1, 900), step(2, 130, 20, 10), step(3, 110, 10)]


def test_the_first_step_counts_only_where_it_is_alone():
    trial = judged(ended(), [snapshot(tables={"latest_steps": STEPS}, steps=3, peak_bytes=7)])
    assert (trial.status, trial.returncode, trial.seconds, trial.tail) == ("ok", 0, 1.5, "the end")
    assert trial.slowdown == pytest.approx(240 / 200)
    assert slowdown(trial.steps[:1]) == 1.0
    assert slowdown(()) is None
    assert trial.steps[1].overhead_ns == 30
    assert trial.steps[1].bookkeeping_ns == 10
    assert trial.peak_bytes == 7


def test_of_several_processes_the_slowest_counts():
    slow = [step(1, 900), step(2, 200, 100)]
    snapshots = [
        snapshot(tables={"latest_steps": STEPS}, steps=3, peak_bytes=7),
        snapshot(tables={"latest_steps": slow}, steps=2, peak_bytes=9),
        snapshot(tables={}, steps=0, peak_bytes=1),
    ]
    trial = judged(ended(), snapshots)
    assert trial.slowdown == pytest.approx(2.0)
    assert (trial.peak_bytes, trial.processes, trial.largest_rank) == (9, 2, 0)


def test_the_rank_with_the_largest_peak_is_recorded():
    ranks = [snapshot(rank=rank, steps=3, peak_bytes=peak) for rank, peak in ((2, 7), (1, 9), (0, 8))]
    agent = snapshot(rank=None, steps=0, peak_bytes=99)
    assert judged(ended(), [*ranks, agent]).largest_rank == 1


def test_the_overhead_is_a_gpus():
    places = {"tables": {"latest_steps": STEPS}, "steps": 3}
    assert judged(ended(), [snapshot(**places, device_index=-1)]).overhead_bytes is None
    ranks = [snapshot(**places, device_index=place, overhead_bytes=500 + place) for place in (0, 1)]
    agent = snapshot(steps=0, device_index=0, overhead_bytes=999)
    assert judged(ended(), [*ranks, agent]).overhead_bytes == 501


@pytest.mark.parametrize(
    ("how", "tables", "status"),
    [
        (ended(), {}, "ok"),
        (ended(1), {}, "failed"),
        (ended(-9), {}, "failed"),
        (ended(1), {"error": {"operator": "mm", "least_budget_bytes": 40}}, "too small"),
        (ended(0), {"error": {"operator": "mm", "least_budget_bytes": 40}}, "too small"),
        (ended(1), {"warnings": [STOPPED]}, "thrash"),
        (ended(0), {"warnings": [STOPPED]}, "ok"),
        (ended(-15, timed_out=True), {}, "thrash"),
    ],
)
def test_how_it_ended(how, tables, status):
    trial = judged(how, [snapshot(tables={"latest_steps": STEPS, **tables}, steps=3)])
    assert trial.status == status
    assert trial.least_budget_bytes == (40 if "error" in tables else None)


def test_no_process_of_ours():
    trial = judged(ended(), [])
    assert (trial.status, trial.steps, trial.peak_bytes, trial.slowdown) == ("ok", (), 0, None)
