"""The table at the end of a run, made from its report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dtrrun.sizes import format_size
from dtrrun.telemetry.fields import PARTS
from dtrrun.telemetry.record import TOO_SMALL, by_rank
from dtrrun.views.figures import too_few
from dtrrun.views.holding import sections
from dtrrun.views.panels import (
    breakdown_table,
    columns_table,
    console_for,
    facts_table,
    heading,
    narrowed,
    operators_table,
    places_table,
    print_to,
    rematerialized,
    rows_table,
)
from dtrrun.views.text import (
    SOURCE,
    TOO_FEW,
    bound_words,
    change_words,
    counts_of,
    duration,
    exceeded,
    extremes,
    highest_budget,
    host_words,
    least_budget,
    longest_seconds,
    native_share,
    plain,
    process_name,
    rate,
    reason_words,
    rule_of,
    rule_words,
    times,
)

MOST = 6
"""Maximum rows of each list; `--json` has them all."""
MOST_CHANGES = 12
"""Maximum lines of changes of the budget."""
HARMLESS = ("replaced", "stopped")
"""Statuses other than `ended` that are not a problem (docs/report.md)."""
NUMBER = 11
"""Columns that a number takes in a table."""
SHOWN_WAITS = 0.005
"""The share of its time that a rank waits for others to recompute, from which this is shown."""
WIDE = 100
"""At this many columns or more, the breakdown shows the full names of its parts."""


def print_final(report: dict[str, Any], stream: TextIO, *, width: int | None = None) -> None:
    """Write the final table of `report` (see `build_report`) to `stream`; in colour only on a terminal.

    Nothing is written if no process of the target was a training process.
    """
    if not report["processes"]:
        return
    console = console_for(stream, width)
    print_to(stream, console, heading("dtrrun"), *_sections(report, console.width))


def _sections(report: dict[str, Any], width: int) -> Iterator[RenderableType]:
    yield _summary(report)
    yield ""
    yield breakdown_table([("in all", report["seconds"])], width, short=width < WIDE)
    if costliest := rematerialized(report["operators"]):
        yield ""
        yield operators_table(costliest, MOST, width)
    if report["places"]:
        yield ""
        yield places_table(report["places"], MOST, width)
    if report["settings"].get("peak"):
        yield ""
        yield from sections(report["holds"], width)
    if len(report["processes"]) > 1:
        yield ""
        yield _processes(sorted(report["processes"], key=lambda one: by_rank(one["rank"])), width)
    if report["verify"]["mismatches"]:
        yield ""
        yield _mismatches(report["verify"])
    if (report["error"] or report["over_budget"]) and report["pinned"]:
        yield ""
        yield _pinned(report["pinned"], width)
    if report["warnings"] or report["least_budget_bytes"]:
        yield ""
    for warning in report["warnings"][:MOST]:
        count = f" ({warning['count']:,} times)" if (warning.get("count") or 1) > 1 else ""
        yield Text.assemble(("warning  ", "yellow"), plain(warning.get("text"), 400) + count)
    if report["least_budget_bytes"]:
        yield _too_small(report)


def _summary(report: dict[str, Any]) -> Table:
    seconds, budget, verify = report["seconds"], highest_budget(report), report["verify"]
    rows = {"peak": _peak(report["peak_bytes"], budget)}
    if report["process_peak_bytes"] and report["driver_peak_bytes"] is None:
        rows["process"] = (
            f"{format_size(report['process_peak_bytes'])}  (its peak, with Python and libraries)"
        )
    if report["driver_peak_bytes"] is not None:
        shown = _peak(report["driver_peak_bytes"], budget).removesuffix(")")
        rows["driver's peak"] = f"{shown}; {SOURCE[report['driver_source']]})"
        if report["violations"]["count"]:
            rows["violations"] = _violations(report["violations"])
    for index, (peak, footprint) in _other_gpus(report).items():
        rows[f"cuda:{index}"] = f"peak {format_size(peak)}, with all else {_peak(footprint, budget)}"
    if rule := rule_of(report):
        rows["heuristic"] = rule_words(rule)
    rows["evictions"] = f"{report['evictions']:,}"
    if report["evictions"]:
        rows["evictions"] += f"  ({format_size(report['evicted_bytes'])})"
    rows["rematerializations"] = f"{report['rematerializations']:,}"
    if report["rematerializations"]:
        cost = duration(seconds["rematerialization"])
        rows["rematerializations"] += f"  ({format_size(report['rematerialized_bytes'])} in {cost})"
    if host := host_words(report):
        rows["host"] = host
    if report["over_budget"]:
        rows["over budget"] = exceeded(report)
    if changes := report.get("budget_changes"):  # missing in reports of older versions
        several = len(report["processes"]) > 1
        lines = [change_words(row, several=several) for row in changes[:MOST_CHANGES]]
        more = len(changes) - MOST_CHANGES
        rows["budget"] = "\n".join([*lines, *([f"… and {more} more changes"] if more > 0 else [])])
    if report["oom_retries"]:
        rows["out of memory"] = f"{times(report['oom_retries'], 'operator')} run again"
    if report["steps"]:
        longest = longest_seconds(report)
        speed = f"  ({rate(report['steps'] / longest)})" if longest > 0 else ""
        rows["steps"] = f"{report['steps']:,}{speed}"
    of_steps = report["step_slowdown_estimate"]
    if of_steps is not None:
        rows["slowdown"] = f"about {of_steps:.2f} × per step  (median without the first{bound_words(report)})"
    elif too_few(report["steps"]):
        rows["slowdown"] = TOO_FEW
    if report["slowdown_estimate"] is not None:
        ours = f"{duration(sum(seconds.get(part, 0) for part in PARTS[1:]))} of {duration(seconds['wall'])}"
        label, start = ("slowdown", "") if of_steps is None else ("in all", ", with start-up")
        rows[label] = f"about {report['slowdown_estimate']:.2f} ×  ({ours}{start})"
    if native := native_share(report):
        rows["native"] = native
    compiled = report.get("compiled") or {}  # missing in reports of older versions
    if compiled.get("graphs"):
        rows["compiled"] = f"{times(compiled['graphs'], 'graph')}, {times(compiled['kernels'], 'kernel')}"
        if compiled["opaque"]:
            rows["compiled"] += f"  ({compiled['opaque']:,} not looked into)"
    if verify["enabled"]:
        wrong = f"{verify['mismatches']:,} differ" if verify["mismatches"] else "all equal"
        rows["verify"] = f"{times(verify['storages'], 'storage')} compared, {wrong}"
    if len(report["processes"]) > 1:
        rows["processes"] = extremes(report)
    if report["exit_code"]:
        rows["exit status"] = str(report["exit_code"])
    bad = {"over budget", "violations", *(["verify"] if verify["mismatches"] else [])}
    return facts_table(
        {label: Text(value, style="red" if label in bad else "") for label, value in rows.items()}
    )


def _other_gpus(report: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Return the largest peaks on each GPU that a process uses besides its first: of tensors, and of all."""
    peaks: dict[int, tuple[int, int]] = {}
    for process in report["processes"]:
        for one in process.get("other_gpus") or ():  # missing in reports of older versions
            tensors, footprint = peaks.get(one["index"], (0, 0))
            found = max(tensors, one["peak_bytes"]), max(footprint, one["footprint_peak_bytes"])
            peaks[one["index"]] = found
    return dict(sorted(peaks.items()))


def _peak(peak: int, budget: int | None) -> str:
    if not budget:
        return f"{format_size(peak)}  (no budget)"
    return f"{format_size(peak)}  ({100 * peak / budget:.1f} % of the budget of {format_size(budget)})"


def _violations(violations: dict[str, Any]) -> str:
    most = format_size(violations["most_bytes"])
    return f"{times(violations['count'], 'time')} over the budget, by {most} at most"


def _processes(processes: list[dict[str, Any]], width: int) -> RenderableType:
    """Return one line per process, omitting the least important figures that do not fit."""
    rows = [_cells(process) for process in processes[: 2 * MOST]]
    unused = ["rematerializations"]
    if not any(process["driver_source"] for process in processes):
        unused += ["driver", "source"]
    if not any((process.get("waited_share") or 0) >= SHOWN_WAITS for process in processes):
        unused += ["waited"]
    names = [name for name in rows[0] if name not in unused]
    long = [name if name != "remat." else "rematerializations" for name in names]
    wider = [] if "driver" in names else [rows_table(rows, long)]
    left_out = ["source", "evictions", "cost", "remat.", "waited", "steps"]
    table = narrowed(width, rows, names, left_out, *wider)
    left = len(processes) - 2 * MOST
    return Group(table, Text(f"… and {left} more", style="dim")) if left > 0 else table


def _cells(process: dict[str, Any]) -> dict[str, str | Text]:
    peak, source = _shown(process)
    evictions, found, cost, steps, slowdown = counts_of(process)
    return {
        "process": process_name(process),
        "peak": format_size(process["peak_bytes"]),
        "driver": peak,
        "source": source,
        "evictions": evictions,
        "rematerializations": found,
        "remat.": found,
        "cost": cost,
        "waited": "–" if (share := process.get("waited_share")) is None else f"{100 * share:.0f} %",
        "steps": steps,
        "slowdown": slowdown,
        "status": _status(process["status"]),
    }


def _status(status: str) -> Text:
    if status == "ended":
        return Text("")
    return Text(plain(status, 20), style="dim" if status in HARMLESS else "red")


def _shown(process: dict[str, Any]) -> tuple[str | Text, str]:
    if process["driver_source"] is None:
        return "–", ""
    style = "red" if process["violations"]["count"] else ""
    peak = Text(format_size(process["driver_peak_bytes"]), style=style)
    return peak, SOURCE[process["driver_source"]]


def _mismatches(verify: dict[str, Any]) -> Table:
    table = columns_table("came back with different bits", "storages", "bytes")
    for row in verify["operators"][: 2 * MOST]:
        name = Text(plain(row.get("operator"), 60), style="red")
        table.add_row(name, f"{row.get('count') or 0:,}", format_size(int(row.get("bytes") or 0)))
    return table


def _pinned(rows: list[dict[str, Any]], width: int) -> Table:
    table = columns_table("pinned (can't be evicted)", "storages", "bytes")
    for row in rows[:MOST]:
        name = Text(plain(reason_words(row), max(width - 2 * NUMBER, NUMBER)))
        table.add_row(name, f"{row.get('storages') or 0:,}", format_size(int(row.get("bytes") or 0)))
    return table


def _too_small(report: dict[str, Any]) -> Text:
    ended = report["exit_code"] or any(one["status"] == TOO_SMALL for one in report["processes"])
    went_on = "" if ended else "The program went on after that. "
    error = report["error"] or {}
    who = ""
    if len(report["processes"]) > 1 and "pid" in error:  # missing in reports of older versions
        who = f"{process_name(error)}: "
    return Text.assemble(
        ("budget too small  ", "yellow" if went_on else "bold red"),
        f"{who}{went_on}It takes {least_budget(report)}.",
    )
