"""The reports of several commands as one: a run on several nodes has a report for each (docs/report.md)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtrrun.telemetry.driver import SOURCES
from dtrrun.telemetry.fields import PARTS
from dtrrun.telemetry.record import by_rank
from dtrrun.views.figures import least_bytes_of, merged, merged_pinned, merged_places, slowdown, too_few
from dtrrun.views.report import COMPILED_COUNTS, HOST_COUNTS, NATIVE_COUNTS

Report = dict[str, Any]
LARGEST = (
    "elapsed_seconds",
    "budget_bytes",
    "peak_bytes",
    "process_peak_bytes",
    "least_budget_bytes",
    "exceeded_bytes",
    "driver_peak_bytes",
    "steps",
    "step_slowdown_estimate",
)
SUMS = (
    "evictions",
    "evicted_bytes",
    "rematerializations",
    "rematerialized_bytes",
    "over_budget",
    "oom_retries",
)
LONGEST_TIMELINE = 64
"""Processes in a timeline, as in that of one command."""
DIFFERENT = "the reports differ in {names}; what is shown is that of {first}"


def merge(reports: Mapping[str, Report]) -> Report:
    """Return one report of several, by the names of their files.

    Like the report of one command with several processes: peaks and steps are the largest, counts and times
    are sums. Command and settings are those of the first. Reports read from files may have invalid values,
    which raise KeyError, TypeError or ValueError.
    """
    found = [*reports.values()]
    first = found[0]
    seconds = {
        part: sum(one["seconds"].get(part, 0.0) for one in found) for part in ("wall", *PARTS, "other")
    }
    steps = _largest(found, "steps")
    return {
        **first,
        **{name: _largest(found, name) for name in LARGEST},
        **{name: sum(one[name] for one in found) for name in SUMS},
        "exit_code": next((one["exit_code"] for one in found if one["exit_code"]), 0),
        "budget_changes": sorted(_rows(found, "budget_changes"), key=lambda row: row["seconds"]),
        "host": _sums(_present(found, "host"), [name for name, _ in HOST_COUNTS], {"left_peak_bytes": max}),
        "driver_source": max(_present(found, "driver_source"), key=SOURCES.index, default=None),
        "violations": _sums(_present(found, "violations"), ["count", "most_bytes"], {"most_bytes": max}),
        "seconds": seconds,
        "bound_by": max(found, key=lambda one: one["seconds"]["wall"])["bound_by"],
        "slowdown_estimate": None if too_few(steps or 0) else slowdown(seconds),
        "native": _native(_present(found, "native")),
        "compiled": _sums([one.get("compiled") or {} for one in found], COMPILED_COUNTS),
        "operators": merged(_rows(found, "operators"), "name", "seconds"),
        "places": merged_places(_rows(found, "places")),
        "pinned": merged_pinned(_rows(found, "pinned")),
        "warnings": [*_different(reports), *merged(_rows(found, "warnings"), "text", "count")],
        "verify": {
            "enabled": any(one["verify"]["enabled"] for one in found),
            **{name: sum(one["verify"][name] for one in found) for name in ("storages", "mismatches")},
            "operators": merged(_rows([one["verify"] for one in found], "operators"), "operator", "count"),
        },
        "error": max(_present(found, "error"), key=least_bytes_of, default=None),
        "holds": max(_present(found, "holds"), key=lambda held: held["bytes"], default=None),
        "processes": _processes(reports),
        "timeline": _timeline(found),
    }


def names_of(paths: Sequence[str]) -> list[str]:
    """Return names for files that tell them apart: `node0` for /runs/node0.json, if no other is called so."""
    stems = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    count = Counter(stems)
    return [path if count[stem] > 1 else stem for path, stem in zip(paths, stems, strict=True)]


def _processes(reports: Mapping[str, Report]) -> list[Report]:
    """Return all processes by rank. Those whose rank does not tell which they are have the report's name."""
    every = [(name, process) for name, one in reports.items() for process in one["processes"]]
    ranks = Counter(process["rank"] for _, process in every)
    found = [
        process | {"report": name if process["rank"] is None or ranks[process["rank"]] > 1 else None}
        for name, process in every
    ]
    return sorted(found, key=lambda one: by_rank(one["rank"]))


def _timeline(found: Sequence[Report]) -> Report | None:
    processes = [one for timeline in _present(found, "timeline") for one in timeline["processes"]]
    return {"processes": processes[:LONGEST_TIMELINE]} if processes else None


def _different(reports: Mapping[str, Report]) -> list[Report]:
    """Return a warning about the command and the settings that are not the same everywhere."""
    first, *others = reports.values()
    names = [
        name
        for name in first["settings"]
        if any(one["settings"].get(name) != first["settings"][name] for one in others)
    ]
    names = [name.removesuffix("_bytes") for name in names]
    names += ["command"] if any(one["command"] != first["command"] for one in others) else []
    if not names:
        return []
    return [{"text": DIFFERENT.format(names=", ".join(names), first=next(iter(reports))), "count": 1}]


def _native(found: Sequence[Report]) -> Report | None:
    sums = _sums(found, NATIVE_COUNTS)
    return None if sums is None else sums | {"calls": merged(_rows(found, "calls"), "name", "count")}


def _sums(
    found: Sequence[Report], names: Iterable[str], how: Mapping[str, Callable[..., Any]] | None = None
) -> Report | None:
    """Return the sums of these fields, or what `how` names; None if there is nothing to sum."""
    if not found:
        return None
    return {name: (how or {}).get(name, sum)(one.get(name) or 0 for one in found) for name in names}


def _largest(found: Sequence[Report], name: str) -> Any:
    return max(_present(found, name), default=None)


def _present(found: Sequence[Report], name: str) -> list[Any]:
    return [value for one in found if (value := one.get(name)) is not None]


def _rows(found: Sequence[Report], name: str) -> list[Report]:
    return [row for one in found for row in one.get(name) or ()]
