"""dtrrun.launch.series and dtrrun.launch.timeline: a run's history, in bounded memory."""

import json
import threading
from dataclasses import replace

import pytest
from fake_records import snapshot

from dtrrun.launch import timeline as timeline_module
from dtrrun.launch.series import MOST_SAMPLES, MOST_STEPS, Series, Thinned
from dtrrun.launch.timeline import Timeline
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Writer, read_all
from tests.waiting import until


def step(index, seconds=1.0, peak=100):
    ns = int(seconds * 1e9)
    return {
        "index": index,
        "ended_ns": int(index * ns),
        "wall_ns": ns,
        "operators_ns": ns // 2,
        "rematerialization_ns": ns // 4,
        "peak_bytes": peak,
    }


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 1000])
def test_neighbours_become_one(count):
    thinned = Thinned(8, lambda one, other: (one[0], other[1]))
    for number in range(count):
        thinned.add((number, number))
    assert len(thinned.rows) <= 8
    if count:
        assert len(thinned.rows) >= min(count, 4)
        flat = [thinned.rows[0][0], *(end for _, end in thinned.rows)]
        assert (flat[0], flat[-1]) == (0, count - 1)
        for (_, end), (begin, _) in zip(thinned.rows, thinned.rows[1:], strict=False):
            assert begin == end + 1


def test_samples():
    series = Series(snapshot(), 2.0)
    for number, resident in enumerate((10, 30, 20)):
        counts = {"evictions": 5 * number, "rematerializations": number}
        series.add(snapshot(resident_bytes=resident, pinned_bytes=number, **counts), 2.0 + number)
    values = series.values()
    assert (values["pid"], values["rank"], values["start"]) == (4711, None, 2.0)
    samples = values["samples"]
    assert samples["seconds"] == [2.0, 3.0, 4.0]
    assert samples["resident_most_bytes"] == samples["resident_least_bytes"] == [10, 30, 20]
    assert samples["pinned_bytes"] == [0, 1, 2]
    assert samples["evictions"][1:] == [5, 5]
    json.dumps(values, allow_nan=False)


def test_many_samples_keep_extremes_and_sums():
    series = Series(snapshot(), 0.0)
    count = 10 * MOST_SAMPLES + 3
    for number in range(count):
        resident = 999 if number == 1234 else 1 if number == 2345 else 500
        series.add(snapshot(resident_bytes=resident, evictions=number + 1), number / 10)
    samples = series.values()["samples"]
    assert MOST_SAMPLES / 2 <= len(samples["seconds"]) <= MOST_SAMPLES
    assert max(samples["resident_most_bytes"]) == 999
    assert min(samples["resident_least_bytes"]) == 1
    assert sum(samples["evictions"]) == count
    assert samples["seconds"] == sorted(samples["seconds"])


def test_steps_are_taken_once():
    series = Series(snapshot(), 10.0)
    series.add_steps([step(1), step(2)])
    series.add_steps([step(2), step(3, peak=300)])
    series.add_steps(None)
    series.add_steps(["no step", {}])
    with pytest.raises(TypeError):
        series.add_steps([{"index": "1"}])
    steps = series.values()["steps"]
    assert steps["first"] == steps["last"] == [1, 2, 3]
    assert steps["ended"] == [11.0, 12.0, 13.0]
    assert steps["peak_bytes"] == [100, 100, 300]
    assert steps["seconds"]["rematerialization"] == [0.25] * 3
    assert steps["seconds"]["other"] == [0.25] * 3


def test_many_steps_become_sums():
    series = Series(snapshot(), 0.0)
    count = 5 * MOST_STEPS
    series.add_steps([step(number, peak=number) for number in range(1, count + 1)])
    steps = series.values()["steps"]
    assert len(steps["first"]) <= MOST_STEPS
    assert sum(steps["count"]) == count
    assert sum(steps["seconds"]["wall"]) == pytest.approx(count)
    assert (steps["first"][0], steps["last"][-1], steps["peak_bytes"][-1]) == (1, count, count)


def test_a_steps_peak_shows_where_most_was_seen_in_it():
    series = Series(snapshot(), 0.0)
    for place, resident in enumerate((50, 10, 80, 20, 10)):
        series.add(snapshot(resident_bytes=resident), place / 2)
    series.add_steps([step(1, peak=100), step(2, peak=60)])
    assert series.values()["samples"]["resident_most_bytes"] == [50, 10, 100, 60, 10]


def test_a_step_before_the_first_look():
    series = Series(snapshot(), 0.0)
    series.add_steps([step(1)])
    series.add(snapshot(resident_bytes=5), 9.0)
    assert series.values()["samples"]["resident_most_bytes"] == [5]


# -- the sampling thread -------------------------------------------------------------------------


def test_a_run_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "EVERY_SECONDS", 0.01)
    looks, look = [], Timeline.look
    monkeypatch.setattr(Timeline, "look", lambda self, *args, **kw: looks.append(look(self, *args, **kw)))
    with Timeline(str(tmp_path)) as timeline:
        writer = Writer(str(tmp_path), {"device": "cpu"})
        helper = Writer(str(tmp_path), {"device": "cpu"})
        for number in range(1, 6):
            writer.counters[COUNTERS.index("resident_bytes")] = number
            writer.counters[COUNTERS.index("steps")] = 8 * number
            writer.publish({"latest_steps": [step(index) for index in range(1, 8 * number + 1)][-32:]})
            seen = len(looks)
            until(lambda seen=seen: len(looks) >= seen + 2)
        snapshots = [one for one in read_all(str(tmp_path)) if one.counters["steps"]]
        writer.close()
        helper.discard()
    values = timeline.values(snapshots)
    (process,) = values["processes"]
    samples = process["samples"]
    assert set(samples["resident_most_bytes"]) >= {1, 3, 5}
    assert process["steps"]["first"] == list(range(1, 41))
    assert samples["seconds"] == sorted(samples["seconds"])
    assert 0 <= samples["seconds"][0] < 30


def test_a_run_is_looked_at_once_if_there_are_no_more_threads(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with Timeline(str(tmp_path)) as timeline:
        writer = Writer(str(tmp_path), {"device": "cpu"})
        snapshots = read_all(str(tmp_path))
    writer.close()
    (process,) = timeline.values(snapshots)["processes"]
    assert len(process["samples"]["seconds"]) == 1


def test_a_process_that_is_over_is_looked_at_no_more(tmp_path):
    timeline = Timeline(str(tmp_path))
    writer = Writer(str(tmp_path), {"device": "cpu"})
    timeline.look()
    writer.close()
    for _ in range(3):
        timeline.look()
    (series,) = timeline._series.values()
    assert len(series.samples.rows) == 2


def test_very_many_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "MOST_PROCESSES", 3)
    many = [replace(snapshot(pid), meta=snapshot(pid).meta | {"start": float(pid)}) for pid in range(1, 9)]
    monkeypatch.setattr(timeline_module, "read_all", lambda folder, tables: many)
    timeline = Timeline(str(tmp_path))
    timeline.look()
    assert len(timeline.values(many)["processes"]) == 3
