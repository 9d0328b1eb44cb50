"""The report of a run: the content of `--json` and of the final table. Its fields: docs/report.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.driver import SOURCES
from dtrrun.telemetry.record import Snapshot
from dtrrun.telemetry.times import bound_by, breakdown
from dtrrun.views.figures import (
    least_bytes_of,
    merged,
    merged_pinned,
    merged_places,
    operators,
    other_gpus,
    run_slowdown,
    slowdown,
    step_slowdown,
    sums,
    table,
    too_few,
    total,
    waited,
)

SCHEMA = "dtrrun.report/1"


PRIVATE = (
    "quiet",
    "gpu",
    "record_dir",
    "log",
    "log_first",
    "log_last",
    "log_rank",
    "peak_bytes",
    "peak_only",
    "plain",
    "state",
    "trace_events",
    "manual_seed",
)
"""Settings that say nothing about how the target ran: output options and the launcher's internals."""


def build_report(
    snapshots: Sequence[Snapshot],
    settings: RuntimeSettings,
    exit_code: int,
    command: Sequence[str],
    wall_seconds: float,
    timeline: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the report (JSON values) of a run whose training processes left `snapshots`.

    wall_seconds: duration of the whole command, including interpreter startup. timeline: the course of the
    run, if it was sampled.
    """
    waits = waited(snapshots)
    return {
        "schema": SCHEMA,
        "command": list(command),
        "exit_code": exit_code,
        "elapsed_seconds": wall_seconds,
        "settings": {name: value for name, value in asdict(settings).items() if name not in PRIVATE},
        "budget_bytes": settings.budget_bytes,
        **_figures(snapshots, settings.verify),
        "holds": holds(snapshots),
        "processes": [
            {
                **{
                    name: snapshot.meta.get(name)
                    for name in ("pid", "ppid", "rank", "argv", "torch", "device")
                },
                "start": snapshot.meta.get("start"),
                "driver_device": snapshot.driver.device if snapshot.driver else None,
                "driver_bytes": snapshot.driver.nbytes if snapshot.driver else None,
                "status": snapshot.status or ("running" if snapshot.alive else "killed"),
                "budget_bytes": _budget(snapshot, settings),
                "last_step": _step(snapshot.values("step")),
                "rule": _rule(snapshot.values("rule")),
                "other_gpus": other_gpus(snapshot),
                "waited_share": waits.get(snapshot.pid),
                **_figures([snapshot], settings.verify),
            }
            for snapshot in snapshots
        ],
        "timeline": timeline,
    }


def _step(step: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the last completed step, which shows what a step costs after the first ones."""
    if step is None:
        return None
    seconds = breakdown(step)
    return {
        "index": step.get("index"),
        "peak_bytes": step.get("peak_bytes"),
        "seconds": seconds,
        "slowdown_estimate": None if too_few(step.get("index") or 0) else slowdown(seconds),
    }


def _figures(snapshots: Sequence[Snapshot], verify: bool) -> dict[str, Any]:
    counters = total(snapshots)
    seconds = breakdown(counters)
    return {
        "peak_bytes": counters.get("peak_bytes", 0),
        "process_peak_bytes": counters.get("process_peak_bytes", 0) or None,
        "least_budget_bytes": counters.get("least_budget_bytes", 0) or None,
        "evictions": counters.get("evictions", 0),
        "evicted_bytes": counters.get("evicted_bytes_total", 0),
        "rematerializations": counters.get("rematerializations", 0),
        "rematerialized_bytes": counters.get("rematerialized_bytes", 0),
        "over_budget": counters.get("over_budget", 0),
        "exceeded_bytes": counters.get("exceeded_bytes", 0),
        "oom_retries": counters.get("oom_retries", 0),
        "budget_changes": budget_changes(snapshots),
        "host": _host(counters),
        **_driver(snapshots),
        "steps": counters.get("steps", 0),
        "bound_by": bound_by(counters),
        "seconds": seconds,
        "slowdown_estimate": run_slowdown(counters),
        "step_slowdown_estimate": step_slowdown(snapshots),
        "native": _native(snapshots),
        "compiled": _compiled(snapshots),
        "operators": operators(snapshots),
        "places": merged_places(table(snapshots, "places")),
        "pinned": merged_pinned(table(snapshots, "pinned")),
        "warnings": merged(table(snapshots, "warnings"), "text", "count"),
        "verify": {
            "enabled": verify,
            "storages": counters.get("verified", 0),
            "mismatches": counters.get("verify_mismatches", 0),
            "operators": merged(table(snapshots, "mismatches"), "operator", "count"),
        },
        "error": _error(snapshots),
    }


def _error(snapshots: Sequence[Snapshot]) -> dict[str, Any] | None:
    """Return the error about the budget of the process that needs most."""
    found = [
        {**error, "pid": one.pid, "rank": one.meta.get("rank")}
        for one in snapshots
        if (error := one.values("error")) is not None
    ]
    return max(found, key=least_bytes_of, default=None)


CHANGE = ("seconds", "step", "from_bytes", "to_bytes", "reason", "operator", "least_bytes")


def budget_changes(snapshots: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Return how `--over-budget raise` has changed the budgets of processes, earliest first."""
    found = [
        {"pid": one.pid, "rank": one.meta.get("rank"), **{name: row.get(name) for name in CHANGE}}
        for one in snapshots
        for row in one.rows("budget_changes")
    ]
    return sorted(found, key=lambda row: row["seconds"] or 0.0)


HOST_COUNTS = (
    ("budget_bytes", "host_budget_bytes"),
    ("peak_bytes", "host_peak_bytes"),
    ("left_peak_bytes", "left_peak_bytes"),
    ("copies_out", "copies_out"),
    ("copied_out_bytes", "copied_out_bytes"),
    ("copies_in", "copies_in"),
    ("copied_in_bytes", "copied_in_bytes"),
)
"""Figures of the host tier: their names in a report, and in the record."""


def _host(counters: Mapping[str, int]) -> dict[str, int] | None:
    """Return what has left for the host; None if constants could not leave."""
    if not counters.get("host_budget_bytes"):
        return None
    return {name: counters.get(counter, 0) for name, counter in HOST_COUNTS}


NATIVE_COUNTS = ("operators", "in_python", "read_by_address")


def _native(snapshots: Sequence[Snapshot]) -> dict[str, Any] | None:
    """Return sums over the processes that had the native part; None if none had it."""
    found = [native for one in snapshots if (native := one.values("native")) is not None]
    if not found:
        return None
    calls = merged((row for native in found for row in native.get("calls") or []), "name", "count")
    return sums(found, NATIVE_COUNTS) | {"calls": calls}


COMPILED_COUNTS = ("graphs", "kernels", "opaque")


def _compiled(snapshots: Sequence[Snapshot]) -> dict[str, int]:
    """Return what torch.compile generated, summed over the processes."""
    return sums((one.values("compiled") or {} for one in snapshots), COMPILED_COUNTS)


RULE = {
    "heuristic": str,
    "since_step": int,
    "source": str,
    "predicted": float,
    "predicted_before": float,
    "share": float,
    "share_before": float,
}


def _rule(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what a process with `--heuristic auto` reports about its rule; unknown fields are None."""
    if told is None:
        return None
    return {name: value if isinstance(value := told.get(name), kind) else None for name, kind in RULE.items()}


def holds(snapshots: Sequence[Snapshot]) -> dict[str, Any] | None:
    """Return what holds the peak (`--peak`), of the process where it is largest; None if it is not known."""
    found = [
        held | {"pid": snapshot.pid, "rank": snapshot.meta.get("rank")}
        for snapshot in snapshots
        if isinstance(held := (snapshot.values("holds") or {}).get("found"), dict)
    ]
    return max(found, key=lambda held: int(held["bytes"]), default=None)


def _driver(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return what the driver showed: the largest peak and the least direct source; None on the CPU."""
    uses = [snapshot.driver for snapshot in snapshots if snapshot.driver]
    return {
        "driver_peak_bytes": max((use.peak_bytes for use in uses), default=None),
        "driver_source": max((use.source for use in uses), key=SOURCES.index, default=None),
        "violations": {
            "count": sum(use.violations for use in uses),
            "most_bytes": max(use.most_over_bytes for use in uses),
        }
        if uses
        else None,
    }


def _budget(snapshot: Snapshot, settings: RuntimeSettings) -> int | None:
    """Return this process's budget: a script may have set its own through the Python API."""
    counted = snapshot.counters.get("budget_bytes", 0)
    return settings.budget_bytes if counted == 0 else None if counted < 0 else counted
