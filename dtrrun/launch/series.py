"""Figures of one training process over time, in bounded memory: neighbours are merged as needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Generic, TypeVar

from dtrrun.telemetry.fields import PARTS
from dtrrun.telemetry.record import Snapshot
from dtrrun.telemetry.times import COUNTED, with_rest

MOST_SAMPLES = 480
MOST_STEPS = 360
TIMES = COUNTED
SUMS = ("evictions", "rematerializations")
"""Counters of which a sample holds the increase since the previous sample."""
LAST = ("evictable_bytes", "pinned_bytes", "evicted_bytes")

Row = dict[str, Any]
T = TypeVar("T")


class Thinned(Generic[T]):
    """A list of at most `most` entries, each of which merges 1, then 2, 4, … neighbours."""

    def __init__(self, most: int, merge: Callable[[T, T], T]) -> None:
        self.rows: list[T] = []
        self._most = most
        self._merge = merge
        self._each = 1
        self._in_last = 0

    def add(self, row: T) -> None:
        if self.rows and self._in_last < self._each:
            self.rows[-1] = self._merge(self.rows[-1], row)
            self._in_last += 1
            return
        if len(self.rows) == self._most:
            pairs = range(0, self._most, 2)
            self.rows = [self._merge(*self.rows[at : at + 2]) for at in pairs]
            self._each *= 2
        self.rows.append(row)
        self._in_last = 1


class Series:
    """The samples of one process. `origin_seconds` is its start, relative to the run's."""

    def __init__(self, snapshot: Snapshot, origin_seconds: float) -> None:
        self.pid = snapshot.pid
        self.rank = snapshot.meta.get("rank")
        self.start = origin_seconds
        self.over = False
        self.samples: Thinned[Row] = Thinned(MOST_SAMPLES, _merged_samples)
        self.steps: Thinned[Row] = Thinned(MOST_STEPS, _merged_steps)
        self.newest = 0  # last step that we have
        self._before: Mapping[str, int] = {}

    def add(self, snapshot: Snapshot, seconds: float) -> None:
        """Add a snapshot. seconds: time from the run's start to when it was read."""
        counters = snapshot.counters
        resident = counters["resident_bytes"]
        row = {"seconds": seconds, "resident_least_bytes": resident, "resident_most_bytes": resident}
        row |= {name: counters[name] for name in LAST}
        row |= {name: counters[name] - self._before.get(name, 0) for name in SUMS}
        self._before = counters
        self.samples.add(row)

    @property
    def behind(self) -> int:
        """Return the number of completed steps that we do not have yet."""
        return self._before.get("steps", 0) - self.newest

    def add_steps(self, table: Any) -> None:
        """Add the new steps of a published table."""
        for step in table if isinstance(table, list) else ():
            if isinstance(step, dict) and step.get("index", 0) > self.newest:
                self._add_step(step)

    def _add_step(self, step: Row) -> None:
        self.newest = index = step["index"]
        ended = self.start + step.get("ended_ns", 0) / 1e9
        peak = step.get("peak_bytes", 0)
        row: Row = {"first": index, "last": index, "count": 1, "ended": ended, "peak_bytes": peak}
        self.steps.add(row | {part: _part(step, part) for part in TIMES})
        self._show_peak(ended - _part(step, "wall"), ended, peak)

    def _show_peak(self, began: float, ended: float, peak: int) -> None:
        """Add a peak, which usually falls between two samples, to the largest sample of its step."""
        rows = self.samples.rows
        first, last = (bisect_right(rows, at, key=itemgetter("seconds")) for at in (began, ended))
        if last and peak:
            highest = max(rows[min(first, last - 1) : last], key=lambda row: row["resident_most_bytes"])
            highest["resident_most_bytes"] = max(highest["resident_most_bytes"], peak)

    def values(self) -> dict[str, Any]:
        """Return JSON values: columns (docs/report.md)."""
        steps = self.steps.rows
        shared = [with_rest(row) for row in steps]
        parts = {part: [_short(row[part]) for row in shared] for part in ("wall", *PARTS, "other")}
        return {
            "pid": self.pid,
            "rank": self.rank,
            "start": _short(self.start),
            "samples": _columns(self.samples.rows),
            "steps": _columns([{k: v for k, v in row.items() if k not in TIMES} for row in steps])
            | {"seconds": parts},
        }


def _part(step: Row, part: str) -> float:
    return (step.get(f"{part}_ns") or 0) / 1e9


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    return {name: [_short(row[name]) for row in rows] for name in (rows[0] if rows else ())}


def _short(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _merged_samples(one: Row, other: Row) -> Row:
    return {
        **other,
        "seconds": one["seconds"],
        "resident_least_bytes": min(one["resident_least_bytes"], other["resident_least_bytes"]),
        "resident_most_bytes": max(one["resident_most_bytes"], other["resident_most_bytes"]),
        **{name: one[name] + other[name] for name in SUMS},
    }


def _merged_steps(one: Row, other: Row) -> Row:
    return {
        **other,
        "first": one["first"],
        "count": one["count"] + other["count"],
        "peak_bytes": max(one["peak_bytes"], other["peak_bytes"]),
        **{part: one[part] + other[part] for part in TIMES},
    }
