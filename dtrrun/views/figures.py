"""Figures derived from the records: sums over processes, the breakdown of time, the slowdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dtrrun.telemetry.advice import bytes_of
from dtrrun.telemetry.fields import ENOUGH_STEPS, OVERHEADS, PARTS
from dtrrun.telemetry.record import Snapshot
from dtrrun.telemetry.times import breakdown

Row = dict[str, Any]
LARGEST = (
    "peak_bytes",
    "process_peak_bytes",
    "steps",
    "least_budget_bytes",
    "exceeded_bytes",
    "left_peak_bytes",
)  # maximum over the processes; all others are summed


def total(snapshots: Sequence[Snapshot]) -> dict[str, int]:
    """Combine the counters of several processes: the largest peak, the most steps, otherwise sums."""
    names = dict.fromkeys(name for snapshot in snapshots for name in snapshot.counters)
    every = {name: [snapshot.counters.get(name, 0) for snapshot in snapshots] for name in names}
    return {name: max(values) if name in LARGEST else sum(values) for name, values in every.items()}


def waited(snapshots: Iterable[Snapshot]) -> dict[int, float]:
    """Return, by process id, the share of a rank's latest steps in which it waits for others to recompute.

    In each step, the ranks of a program wait for the one whose recomputation, with the rest of dtrrun's work,
    takes longest. The steps are those that all of its ranks on this machine still know (32 at most).
    """
    worlds: dict[str, dict[int, dict[int, tuple[int, int]]]] = {}
    for one in snapshots:
        if world := one.meta.get("world"):
            rows = (row for row in one.rows("latest_steps") if row.get("index", 0) > 1)
            worlds.setdefault(world, {})[one.pid] = {row["index"]: _times(row) for row in rows}
    found = {}
    for ranks in worlds.values():
        steps = set.intersection(*map(set, ranks.values())) if len(ranks) > 1 else set()
        longest = sum(max(rank[step][0] for rank in ranks.values()) for step in steps)
        for pid, rank in ranks.items():
            overhead, wall = (sum(rank[step][place] for step in steps) for place in (0, 1))
            if wall > 0:
                found[pid] = min((longest - overhead) / wall, 1.0)
    return found


def _times(step: Row) -> tuple[int, int]:
    """Return what dtrrun has taken in a step, and the whole step, in ns."""
    return sum(step.get(name) or 0 for name in OVERHEADS), step.get("wall_ns") or 0


OF_GPU = {
    "index": "device_index",
    "bytes": "resident_bytes",
    "peak_bytes": "peak_bytes",
    "evicted_bytes": "evicted_bytes",
    "footprint_peak_bytes": "footprint_peak_bytes",
}
"""What is told of a GPU besides the first: its names in a report, and in the record."""


def other_gpus(snapshot: Snapshot) -> list[dict[str, int]]:
    """Return the figures of the GPUs that a process uses besides the first."""
    return [
        {name: int(row.get(counter) or 0) for name, counter in OF_GPU.items()}
        for row in snapshot.rows("other_devices")
    ]


def least_bytes_of(error: Row) -> int:
    """Return the least budget that an error about the budget names."""
    return bytes_of(error, "least_budget_bytes")


PLACE = ("module", "line", "name")


def slowdown(seconds: Mapping[str, float]) -> float | None:
    """Return the estimated time relative to that without dtrrun; None if nothing was measured."""
    own = seconds["wall"] - sum(seconds[part] for part in PARTS[1:])
    return seconds["wall"] / own if own > 0 else None


def too_few(steps: int) -> bool:
    """Return whether a run has made too few steps to say how much longer they take."""
    return 0 < steps < ENOUGH_STEPS


def run_slowdown(counters: Mapping[str, int]) -> float | None:
    """Return the slowdown of a whole run, with its start; None if there is nothing to estimate it from."""
    return None if too_few(counters.get("steps", 0)) else slowdown(breakdown(counters))


def step_slowdown(snapshots: Iterable[Snapshot]) -> float | None:
    """Return the slowest process's median slowdown of steps after the first; None if none made enough steps.

    A long run approaches it; the slowdown of a whole run counts PyTorch's startup as the program's own time.
    """
    told = (snapshot.tables.get("step_slowdown") for snapshot in snapshots)
    return max((float(one) for one in told if isinstance(one, (int, float))), default=None)


def sums(rows: Iterable[Row], names: Iterable[str]) -> Row:
    """Return the sums of these fields."""
    rows = list(rows)
    return {name: sum(row.get(name) or 0 for row in rows) for name in names}


def merged(rows: Iterable[Row], key: str, order: str) -> list[Row]:
    """Merge rows with equal `key` by adding their numbers; largest `order` first."""
    found: dict[Any, Row] = {}
    for row in rows:
        into = found.setdefault(row.get(key), {key: row.get(key)})
        for name, value in row.items():
            if name != key and isinstance(value, (int, float)):
                into[name] = into.get(name, 0) + value
    return sorted(found.values(), key=lambda row: row.get(order) or 0, reverse=True)


HOLDERS = 3
"""How many holders the report names for each reason."""


def merged_pinned(rows: Sequence[Row]) -> list[Row]:
    """Return what could not be evicted by reason, largest first, with what holds most of it."""
    found = merged(rows, "reason", "bytes")
    for one in found:
        lists = [row.get("held_by") for row in rows if row.get("reason") == one["reason"]]
        holders = [
            held for each in lists if isinstance(each, list) for held in each if isinstance(held, dict)
        ]
        one["held_by"] = sorted(holders, key=lambda held: bytes_of(held, "bytes"), reverse=True)[:HOLDERS]
    return found


def merged_places(rows: Iterable[Row]) -> list[Row]:
    """Return where the program called the operators that were run again, costliest first."""
    placed = [{**row, "place": tuple(row.get(name) for name in PLACE)} for row in rows]
    found = merged(placed, "place", "seconds")
    return [dict(zip(PLACE, row.pop("place"), strict=True)) | row for row in found]


def table(snapshots: Iterable[Snapshot], name: str) -> list[Row]:
    """Return one published table, concatenating the rows of all processes."""
    return [row for snapshot in snapshots for row in snapshot.rows(name)]


def operators(snapshots: Iterable[Snapshot]) -> list[Row]:
    """Return operators by the cost of their rematerializations, costliest first."""
    return merged(table(snapshots, "operators"), "name", "seconds")
