"""The table at the end of a run, made from its report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dtrrun.sizes import format_size
from dtrrun.telemetry.fields import PARTS
from dtrrun.views.panels import (
    breakdown_table,
    columns_table,
    console_for,
    operators_table,
    places_table,
    print_to,
    rematerialized,
)
from dtrrun.views.text import SOURCE, counts_of, duration, least_budget, plain, rate, times

MOST = 6
"""Maximum rows of each list; `--json` has them all."""
HARMLESS = ("replaced", "stopped")
"""How a process may end without a status and without a problem (docs/report.md)."""
WIDE = 100
"""From this many columns on, the parts of the breakdown have their full names."""


def print_final(report: dict[str, Any], stream: TextIO, *, width: int | None = None) -> None:
    """Write the final table of `report` (see `build_report`) to `stream`; in colour only on a terminal.

    Nothing is written if no process of the target was a training process.
    """
    if not report["processes"]:
        return
    console = console_for(stream, width)
    title = Rule("dtrrun", style="dim", align="left", characters="─")
    print_to(stream, console, title, *_sections(report, console.width))


def _sections(report: dict[str, Any], width: int) -> Iterator[RenderableType]:
    yield _summary(report)
    yield ""
    yield breakdown_table([("in all", report["seconds"])], short=width < WIDE)
    if costliest := rematerialized(report["operators"]):
        yield ""
        yield operators_table(costliest, MOST, width)
    if report["places"]:
        yield ""
        yield places_table(report["places"], MOST, width)
    if len(report["processes"]) > 1:
        yield ""
        yield _processes(report["processes"])
    if report["verify"]["mismatches"]:
        yield ""
        yield _mismatches(report["verify"])
    if (report["error"] or report["over_budget"]) and report["pinned"]:
        yield ""
        yield _pinned(report["pinned"])
    if report["warnings"] or report["least_budget_bytes"]:
        yield ""
    for warning in report["warnings"][:MOST]:
        count = f" ({warning['count']:,} times)" if (warning.get("count") or 1) > 1 else ""
        yield Text.assemble(("warning  ", "yellow"), plain(warning.get("text"), 400) + count)
    if report["least_budget_bytes"]:
        yield _too_small(report)


def _summary(report: dict[str, Any]) -> Table:
    seconds, budget, verify = report["seconds"], report["budget_bytes"], report["verify"]
    rows = {"peak": _peak(report["peak_bytes"], budget)}
    if report["process_peak_bytes"] and report["driver_peak_bytes"] is None:
        rows["resident set"] = f"{format_size(report['process_peak_bytes'])}  (the process's peak)"
    if report["driver_peak_bytes"] is not None:
        shown = _peak(report["driver_peak_bytes"], budget).removesuffix(")")
        rows["driver's peak"] = f"{shown}; {SOURCE[report['driver_source']]})"
        if report["violations"]["count"]:
            rows["violations"] = _violations(report["violations"])
    if rule := next((rule for one in report["processes"] if (rule := one.get("rule"))), None):
        rows["heuristic"] = _rule(rule)
    rows["evictions"] = f"{report['evictions']:,}"
    if report["evictions"]:
        rows["evictions"] += f"  ({format_size(report['evicted_bytes'])})"
    rows["rematerializations"] = f"{report['rematerializations']:,}"
    if report["rematerializations"]:
        cost = duration(seconds["rematerialization"])
        rows["rematerializations"] += f"  ({format_size(report['rematerialized_bytes'])} in {cost})"
    if report["over_budget"]:
        rows["over budget"] = times(report["over_budget"], "time")
    if report["oom_retries"]:
        rows["out of memory"] = f"{times(report['oom_retries'], 'operator')} run again"
    if report["steps"]:
        longest = max(process["seconds"]["wall"] for process in report["processes"])
        speed = f"  ({rate(report['steps'] / longest)})" if longest > 0 else ""
        rows["steps"] = f"{report['steps']:,}{speed}"
    if report["slowdown_estimate"] is not None:
        ours = f"{duration(sum(seconds[part] for part in PARTS[1:]))} of {duration(seconds['wall'])}"
        estimated = report["dispatch_seconds"]
        digits = ".2f" if estimated < seconds["wall"] / 20 else ".2g"  # estimates justify fewer
        some = f", {duration(estimated)} of it estimated" if digits == ".2g" else ""
        rows["slowdown"] = f"about {report['slowdown_estimate']:{digits}} ×  ({ours}{some})"
    if (native := report["native"]) and native["operators"]:
        share = 100 * (1 - native["in_python"] / native["operators"])
        rows["native"] = f"{share:.1f} % of {times(native['operators'], 'operator')}"
    if verify["enabled"]:
        wrong = f"{verify['mismatches']:,} differ" if verify["mismatches"] else "all equal"
        rows["verify"] = f"{times(verify['storages'], 'storage')} compared, {wrong}"
    if report["exit_code"]:
        rows["exit status"] = str(report["exit_code"])
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in rows.items():
        bad = label in ("over budget", "violations") or (label == "verify" and verify["mismatches"])
        table.add_row(label, Text(value, style="red" if bad else ""))
    return table


FROM = {
    "first": "as at the beginning",
    "remembered": "from an earlier run",
    "searched": "found on logged steps",
    "varying": "no step is like another",
    "worse": "another one was tried, and was worse",
    "thrashing": "with the one before, a step went on recomputing",
}


def _rule(rule: dict[str, Any]) -> str:
    """Return the heuristic that a run with `auto` has come to, and what it is good for."""
    facts = [FROM.get(rule["source"], plain(rule["source"], 30))]
    if (since := rule["since_step"]) is not None and since > 1:
        facts.append(f"since step {since:,}")
    if (share := rule["share"]) is not None:
        before = rule["share_before"]
        instead = "" if before is None else f" instead of {before:.0%}"
        facts.append(f"{share:.0%} of the step's own work is recomputed{instead}")
    elif (predicted := rule["predicted"]) is not None:
        facts.append(f"predicted: {max(predicted - 1, 0):.0%} of the step's own work is recomputed")
    return f"{plain(rule['heuristic'], 60)}  ({'; '.join(facts)})"


def _peak(peak: int, budget: int | None) -> str:
    if not budget:
        return f"{format_size(peak)}  (no budget)"
    return f"{format_size(peak)}  ({100 * peak / budget:.1f} % of the budget of {format_size(budget)})"


def _violations(violations: dict[str, Any]) -> str:
    most = format_size(violations["most_bytes"])
    return f"{times(violations['count'], 'time')} over the budget, by {most} at most"


def _processes(processes: list[dict[str, Any]]) -> RenderableType:
    on_gpu = any(process["driver_source"] for process in processes)
    driver = ("driver", "source") if on_gpu else ()
    operators = "remat." if on_gpu else "rematerializations"
    table = columns_table("process", "peak", *driver, "evictions", operators, "cost", "steps", "slowdown", "")
    for process in processes[: 2 * MOST]:
        rank = process["rank"]
        table.add_row(
            f"pid {process['pid']}" if rank is None else f"rank {plain(rank, 8)}",
            format_size(process["peak_bytes"]),
            *(_shown(process) if on_gpu else ()),
            *counts_of(process),
            _status(process["status"]),
        )
    left = len(processes) - 2 * MOST
    return Group(table, Text(f"… and {left} more", style="dim")) if left > 0 else table


def _status(status: str) -> Text:
    if status == "ended":
        return Text("")
    return Text(plain(status, 20), style="dim" if status in HARMLESS else "red")


def _shown(process: dict[str, Any]) -> tuple[RenderableType, str]:
    if process["driver_source"] is None:
        return "–", ""
    style = "red" if process["violations"]["count"] else ""
    peak = Text(format_size(process["driver_peak_bytes"]), style=style)
    return peak, SOURCE[process["driver_source"]]


def _mismatches(verify: dict[str, Any]) -> Table:
    table = columns_table("came back with other bits", "storages", "bytes")
    for row in verify["operators"][: 2 * MOST]:
        name = Text(plain(row.get("operator"), 60), style="red")
        table.add_row(name, f"{row.get('count') or 0:,}", format_size(int(row.get("bytes") or 0)))
    return table


def _pinned(rows: list[dict[str, Any]]) -> Table:
    table = columns_table("pinned (can't be evicted)", "storages", "bytes")
    for row in rows[:MOST]:
        name = Text(plain(row.get("reason"), 60))
        table.add_row(name, f"{row.get('storages') or 0:,}", format_size(int(row.get("bytes") or 0)))
    return table


def _too_small(report: dict[str, Any]) -> Text:
    went_on = "" if report["exit_code"] else "The program went on after that. "
    return Text.assemble(
        ("budget too small  ", "yellow" if went_on else "bold red"),
        f"{went_on}It takes {least_budget(report)}.",
    )
