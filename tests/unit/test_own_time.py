"""`runtime.observe.own_time`, `telemetry.times`: dtrrun's own time on a busy machine, and the GPU's time."""

import threading
import time

import pytest

from dtrrun.runtime.observe import own_time
from dtrrun.runtime.observe.own_time import MOST, OwnTime, ProcessorWait, without_waits
from dtrrun.telemetry.times import bound_by, breakdown, effective
from dtrrun.views.figures import slowdown

MS = 1_000_000


def test_brief_pieces_get_their_share_of_the_waits_for_a_processor():
    own = OwnTime(2)
    assert own.add(100 * MS, 0, (10 * MS, 20 * MS)) == [10 * MS, 20 * MS]
    # In the next 100 ms the thread runs for 25: each piece takes four times as long as it was measured.
    assert own.add(200 * MS, 75 * MS, (11 * MS, 22 * MS)) == [14 * MS, 28 * MS]
    assert own.add(200 * MS, 75 * MS, (11 * MS, 22 * MS)) == [14 * MS, 28 * MS]
    assert own.add(300 * MS, 75 * MS, (12 * MS, 22 * MS)) == [15 * MS, 28 * MS]


def test_the_share_is_limited_where_the_counts_contradict_each_other():
    own = OwnTime(1)
    assert own.add(10 * MS, 11 * MS, (1 * MS,)) == [MOST * MS]


def test_a_thread_that_sleeps_does_not_wait_for_a_processor():
    waits = ProcessorWait()
    before = waits.ns()
    time.sleep(0.05)
    assert 0 <= waits.ns() - before < 50 * MS
    found = []
    thread = threading.Thread(target=lambda: found.append(ProcessorWait().ns()))
    thread.start()
    thread.join()
    assert found[0] >= 0


def test_a_piece_is_counted_without_the_waits_since_the_last_one(monkeypatch):
    waits = iter([5 * MS, 5 * MS, 5 * MS, 9 * MS, 9 * MS, 30 * MS])
    monkeypatch.setattr(ProcessorWait, "ns", lambda _: next(waits))
    monkeypatch.setattr(own_time, "_known", own_time._Known())
    assert [without_waits(ns) for ns in (0, 1 * MS, 5 * MS, 2 * MS, 3 * MS)] == [0, 1 * MS, 1 * MS, 2 * MS, 0]


def a_step(wall, operators, again, *, bookkeeping=0, device=(0, 0)):
    return {
        "wall_ns": wall * MS,
        "operators_ns": operators * MS,
        "rematerialization_ns": again * MS,
        "scoring_ns": 0,
        "search_ns": 0,
        "bookkeeping_ns": bookkeeping * MS,
        "device_operators_ns": device[0] * MS,
        "device_rematerialization_ns": device[1] * MS,
    }


@pytest.mark.parametrize(
    ("step", "by", "expected"),
    [
        (a_step(100, 60, 20), None, 100 / 80),
        # The host launches everything in 30 ms, and the step waits for the GPU.
        (a_step(100, 20, 5, bookkeeping=5, device=(32, 64)), "device", 100 / (100 - 64 - 4)),
        # It is counted before the GPU is done.
        (a_step(30, 20, 5, bookkeeping=5, device=(32, 64)), "device", 3.0),
        # The GPU waits for the host.
        (a_step(100, 50, 20, bookkeeping=10, device=(10, 5)), "host", 100 / 70),
    ],
)
def test_a_step_takes_as_long_as_the_gpu_or_as_the_host(step, by, expected):
    assert bound_by(step) == by
    seconds = breakdown(step)
    assert slowdown(seconds) == pytest.approx(expected)
    assert sum(seconds.values()) - seconds["wall"] == pytest.approx(seconds["wall"])
    assert effective(effective(step)) == effective(step)
