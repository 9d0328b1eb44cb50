"""The data of the page's charts, thinned to keep the page small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from dtrrun.telemetry.fields import PARTS
from dtrrun.telemetry.holding import CLASSES
from dtrrun.views.holding import line_of
from dtrrun.views.html.holding import key_of
from dtrrun.views.text import plain

MOST_VALUES = 60_000
"""Maximum number of values in all charts together: about half a megabyte."""
SAMPLES = (
    "seconds",
    "resident_least_bytes",
    "resident_most_bytes",
    "evictable_bytes",
    "pinned_bytes",
    "evicted_bytes",
    "evictions",
    "rematerializations",
)
SHARES = (*PARTS, "other")

FIRST, LAST = itemgetter(0), itemgetter(-1)

Json = dict[str, Any]


def charts(report: Mapping[str, Any], profile: Mapping[str, Any] | None) -> Json:
    """Return the data that `charts.js` reads."""
    timeline = report.get("timeline") or {"processes": []}
    by_pid = {process["pid"]: process for process in report["processes"]}
    found = [_process(process, by_pid.get(process["pid"], {})) for process in timeline["processes"]]
    found.sort(key=lambda process: process["order"])
    while sum(map(_size, found)) > MOST_VALUES:
        found = [_halved(process) for process in found]
    return {
        "processes": found,
        "curve": curve(profile),
        "budget_bytes": report["budget_bytes"],
        "layers": layers(report.get("holds")),
    }


def layers(holds: Mapping[str, Any] | None) -> Json | None:
    """Return the bytes by class over a step (`--peak`), and what there was most of at each moment."""
    found = None if holds is None else holds["layers"]
    if found is None:
        return None
    return {
        "operators": _numbers(found["operators"]),
        "peak": _number(found["peak"]),
        "backward": None if found["backward"] is None else _number(found["backward"]),
        "optimizer": None if found["optimizer"] is None else _number(found["optimizer"]),
        "classes": [
            {"name": name, "key": key_of(name), "bytes": _numbers(found["classes"][name])}
            for name in CLASSES
            if name in found["classes"]
        ],
        "places": [
            " ".join(plain(part, 80) for part in (row["class"], row["module"], line_of(row["line"])) if part)
            for row in found["places"]
        ],
        "top": [[_numbers(pair) for pair in moment] for moment in found["top"]],
    }


def curve(profile: Mapping[str, Any] | None) -> list[Json]:
    """Return the points of a profile, smallest budget first, with None for missing slowdowns."""
    points = [
        {
            "budget_bytes": _number(point["budget_bytes"]),
            "predicted": _slowdown(point.get("predicted")),
            "measured": _slowdown(point.get("measured")),
            "failed": point.get("measured") is not None and _slowdown(point["measured"]) is None,
        }
        for point in (profile or {}).get("points", ())
    ]
    return sorted(points, key=lambda point: point["budget_bytes"])


def _slowdown(found: Any) -> float | None:
    value = found.get("slowdown") if isinstance(found, Mapping) else found
    return None if value is None else _number(value)


def _budgets(of_report: Mapping[str, Any], start: float) -> list[list[float]]:
    """Return the budgets of a process: from which second of the run on, and bytes. Empty if it had none.

    of_report: what the report says of it. start: when its runtime became active, in seconds of the run.
    """
    changes = of_report.get("budget_changes") or ()
    first = changes[0]["from_bytes"] if changes else of_report.get("budget_bytes")
    if first is None:
        return []
    later = [[start + _number(row["seconds"]), _number(row["to_bytes"])] for row in changes]
    return [[0, _number(first)], *later]


def _process(process: Mapping[str, Any], of_report: Mapping[str, Any]) -> Json:
    samples, steps, rank = process["samples"], process["steps"], process["rank"]
    seconds = steps["seconds"]
    return {
        "label": f"process {plain(process['pid'], 12)}" if rank is None else f"rank {plain(rank, 8)}",
        "order": rank if isinstance(rank, int) else 0,
        "budgets": _budgets(of_report, _number(process["start"])),
        "samples": {name: _numbers(samples.get(name, ())) for name in SAMPLES},
        "steps": {name: _numbers(steps.get(name, ())) for name in ("first", "last", "count", "ended")}
        | {part: _numbers(seconds.get(part, ())) for part in SHARES},
    }


def _halved(process: Json) -> Json:
    """Merge adjacent values in pairs."""
    samples, steps = process["samples"], process["steps"]
    how = {"seconds": FIRST, "resident_least_bytes": min, "resident_most_bytes": max}
    how |= {"evictions": sum, "rematerializations": sum}
    of_steps = {"first": FIRST, "last": LAST, "ended": LAST}
    return process | {
        "samples": {name: _pairs(values, how.get(name, LAST)) for name, values in samples.items()},
        "steps": {name: _pairs(values, of_steps.get(name, sum)) for name, values in steps.items()},
    }


def _pairs(values: Sequence[float], merge: Any) -> list[float]:
    return [merge(values[at : at + 2]) for at in range(0, len(values), 2)]


def _size(process: Json) -> int:
    return sum(len(values) for part in ("samples", "steps") for values in process[part].values())


def _numbers(values: Sequence[Any]) -> list[float]:
    return [_number(value) for value in values]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{plain(repr(value), 40)} is no number")
    return value
