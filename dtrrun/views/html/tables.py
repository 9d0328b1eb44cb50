"""The text and tables of the page, with each value as text; the template only places them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from dtrrun.settings import RuntimeSettings, rows
from dtrrun.sizes import format_size
from dtrrun.telemetry.fields import PARTS, SOMETIMES
from dtrrun.views.figures import too_few
from dtrrun.views.text import (
    SOURCE,
    TOO_FEW,
    bound_words,
    counts_of,
    duration,
    exceeded,
    highest_budget,
    host_words,
    least_budget,
    longest_seconds,
    native_share,
    plain,
    process_name,
    reason_words,
    rule_of,
    rule_words,
    share,
    slowdown_of,
    times,
    times_as_long,
    words_of,
)

LONGEST = 300
MOST_ROWS = 20
MOST_PROCESSES = 128

Json = dict[str, Any]
Row = Mapping[str, Any]


def tables(report: Row) -> Json:
    """Return the variables of `page.html`."""
    command = [str(word) for word in report["command"]]
    seconds, budget = report["seconds"], report["budget_bytes"]
    return {
        "title": words_of(command, LONGEST),
        "figures": list(_figures(report)),
        "problems": list(_problems(report)),
        "parts": [
            _part(name, seconds) for name in (*PARTS, "other") if name not in SOMETIMES or seconds.get(name)
        ],
        "wall": _total(report),
        "operators": _operators(report["operators"]),
        "places": _operators(report.get("places") or ()),
        "pinned": [
            (plain(reason_words(row), LONGEST), f"{row.get('storages') or 0:,}", _size(row.get("bytes")))
            for row in report["pinned"][:MOST_ROWS]
        ],
        "warnings": [
            (plain(row.get("text"), 2 * LONGEST), row.get("count") or 1)
            for row in report["warnings"][:MOST_ROWS]
        ],
        "processes": [_process(process, budget) for process in report["processes"][:MOST_PROCESSES]],
        "changes": [_change(row) for row in (report.get("budget_changes") or ())[:MOST_PROCESSES]],
        "settings": [
            _setting(name, value)
            for name, value in sorted(report["settings"].items(), key=_is_default)
            # Only of interest if the program compiles, so omitted otherwise.
            if name != "compile" or (report.get("compiled") or {}).get("graphs")
        ],
        "several": len(report["processes"]) > 1,
        "schema": plain(report["schema"], 40),
    }


def _figures(report: Row) -> Iterable[tuple[str, str, str]]:
    """Yield the figures at the top of the page: label, value, remark."""
    budget, peak = highest_budget(report), report["peak_bytes"]
    remark = f"{100 * peak / budget:.1f} % of the budget" if budget else "no budget"
    yield "peak", format_size(peak), remark
    if budget:
        devices = sorted({plain(process["device"], 20) for process in report["processes"]})
        where = f"on {', '.join(devices)}" if devices else ""
        raised = (
            f"raised from {format_size(report['budget_bytes'])}; " if budget != report["budget_bytes"] else ""
        )
        yield "budget", format_size(budget), raised + where
    if report["driver_peak_bytes"] is not None:
        source = SOURCE.get(report["driver_source"], plain(report["driver_source"], 20))
        yield "driver's peak", format_size(report["driver_peak_bytes"]), source
    elif report.get("process_peak_bytes"):  # missing in reports of older versions
        yield "process", format_size(report["process_peak_bytes"]), "its peak, with Python and libraries"
    if (found := slowdown_of(report)) is not None:
        per_step, in_all = report.get("step_slowdown_estimate") is not None, report["slowdown_estimate"]
        remark = f"per step, median without the first{bound_words(report)}" if per_step else "estimated"
        if per_step and in_all is not None:
            remark += f"; {in_all:.2f} × with the start"
        yield "slowdown", times_as_long(found), remark
    elif too_few(report["steps"]):
        words, _, why = TOO_FEW.partition("  (")
        yield "slowdown", "–", f"{words}: {why.removesuffix(')')}"
    if rule := rule_of(report):
        name, _, facts = rule_words(rule).partition("  (")
        name, _, settings = name.partition("(")
        yield (
            "heuristic",
            name,
            "; ".join(filter(None, (facts.removesuffix(")"), settings.removesuffix(")").replace(",", ", ")))),
        )
    if native := native_share(report):
        share_of, _, rest = native.partition(" of ")
        yield "native", share_of, f"of {rest}"
    yield "evictions", f"{report['evictions']:,}", format_size(report["evicted_bytes"])
    found = report["rematerializations"]
    yield "rematerializations", f"{found:,}", f"in {duration(report['seconds']['rematerialization'])}"
    if host := host_words(report):
        out, _, rest = host.partition(", ")
        yield "host", out, rest
    yield "steps", f"{report['steps']:,}", f"in {duration(longest_seconds(report))}"
    yield "exit status", f"{report['exit_code']:d}", ""


def _problems(report: Row) -> Iterable[str]:
    verify, violations = report["verify"], report["violations"]
    if report["error"] or report["least_budget_bytes"]:
        yield f"The budget was too small: it takes {least_budget(report)}."
    if report["over_budget"]:
        yield f"The budget was exceeded {exceeded(report)}."
    if violations and violations["count"]:
        most = format_size(violations["most_bytes"])
        yield f"By the driver, over the budget {times(violations['count'], 'time')}, by {most} at most."
    if verify["mismatches"]:
        yield f"{times(verify['mismatches'], 'storage')} came back with different bits (--verify)."


def _total(report: Row) -> str:
    """Return how long the run took, of which the parts are shares: the sum over processes."""
    wall, count = duration(report["seconds"]["wall"]), len(report["processes"])
    return f"{wall} in all" if count < 2 else f"{wall} in {count} processes"


WORDS = {True: "yes", False: "no", None: "–"}
OPTIONS = {row.field: row for row in rows(RuntimeSettings)}


def _is_default(setting: tuple[str, Any]) -> bool:
    name, value = setting
    return name in OPTIONS and value == OPTIONS[name].default


def _setting(name: str, value: Any) -> tuple[str, str, str]:
    """Return an option as it would be typed, its value in words, and what it does."""
    row = OPTIONS.get(name)
    if row is None:  # of another version
        return plain(name, 40), "–" if value is None else plain(value, 80), ""
    said = WORDS[value] if value is None or isinstance(value, bool) else plain(value, 80)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        said = _number(name, value)
    return row.names[0], said, row.help


def _number(name: str, value: float) -> str:
    """Return a number as it would be typed."""
    if name.endswith("_bytes"):
        return format_size(int(value))
    if name == "ignore_small":
        return share(value, 1)
    return f"{value:g} ×" if name == "max_slowdown" else f"{value:,g}"


def _part(name: str, seconds: Row) -> Json:
    """Return one part of the time; `percent` is for the bar."""
    wall = seconds["wall"]
    percent = 100 * seconds[name] / wall if wall > 0 else 0.0
    return {
        "name": name,
        "seconds": duration(seconds[name]),
        "share": share(seconds[name], wall),
        "percent": f"{percent:.3f}",
    }


def _operators(rows: Iterable[Row]) -> list[Json]:
    """Return the operators that were run again or evicted. `percent`: of the costliest one's time."""
    found = [row for row in rows if row.get("rematerializations") or row.get("evictions")][:MOST_ROWS]
    most = max((row.get("seconds") or 0.0 for row in found), default=0.0)
    return [
        {
            "name": plain(row.get("name"), LONGEST),
            "module": plain(row.get("module") or "–", LONGEST),
            "line": plain(os.path.basename(row.get("line") or "–"), LONGEST),
            "rematerializations": f"{row.get('rematerializations') or 0:,}",
            "seconds": duration(row.get("seconds") or 0.0),
            "bytes": _size(row.get("bytes")),
            "evictions": f"{row.get('evictions') or 0:,}",
            "percent": f"{100 * (row.get('seconds') or 0.0) / most if most else 0:.2f}",
        }
        for row in found
    ]


def _change(row: Row) -> tuple[str, ...]:
    """Return when a budget was changed, from what to what, and why."""
    why = "the device has no more" if row["reason"] == "refused" else "the device has it again"
    if row["reason"] == "too small":
        why = f"{plain(row['operator'], LONGEST)}, with what must stay, takes {_size(row['least_bytes'])}"
    sizes = _size(row["from_bytes"]), _size(row["to_bytes"])
    return process_name(row), f"{row['step']:,}", duration(row["seconds"]), *sizes, why


def _process(process: Row, budget: int | None) -> tuple[str, ...]:
    name = process_name(process)
    return (
        name if process["rank"] is None else f"{name} (pid {plain(process['pid'], 12)})",
        plain(process["device"], 20),
        format_size(process["peak_bytes"]),
        *counts_of(process),
        plain(process["status"], 40),
    )


def _size(nbytes: Any) -> str:
    return format_size(int(nbytes or 0))
