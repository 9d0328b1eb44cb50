"""Formats numbers and names uniformly in all views."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dtrrun.sizes import format_size, format_size_up
from dtrrun.telemetry.advice import advice_of
from dtrrun.telemetry.fields import ENOUGH_STEPS

PLAIN = str.maketrans(
    {"×": "x", "·": "-", "…": "~", "–": "-", "─": "-", "µ": "u", "█": "#", "▓": "=", "░": ".", "≥": ">"}
)


SOURCE = {
    "nvml_pid": "NVML",
    "kfd_pid": "KFD",
    "nvml_new_pid": "new pid",
    "device_delta": "device",
    "reserved_overhead": "estimate",
}
"""Short names of the sources of the driver's figures (`telemetry.driver.SOURCES`)."""


def plain(text: object, limit: int = 200) -> str:
    """Make a script's text safe to show: no control characters or line ends, limited length."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def reason_words(row: Mapping[str, Any]) -> str:
    """Return why memory could not be evicted, and what holds most of it."""
    reason, holders = str(row.get("reason")), row.get("held_by")
    first = holders[0] if isinstance(holders, list) and holders else None
    if not isinstance(first, dict):
        return reason
    why = str(first.get("why"))
    return f"{reason}: {first.get('name')}" + (f" ({why})" if why != reason else "")


def words_of(command: Sequence[str], limit: int = 200) -> str:
    """Return a target's command, without the path of its interpreter."""
    first, *rest = command or [""]
    words = rest if rest and os.path.basename(first).startswith("python") else [first, *rest]
    return plain(" ".join(words), limit)


def for_encoding(text: str, encoding: str | None) -> str:
    """Return `text`, as ASCII if a stream of this encoding can't represent all of it."""
    try:
        text.encode(encoding or "utf-8")
        return text
    except (UnicodeEncodeError, LookupError):
        return text.translate(PLAIN).encode("ascii", errors="replace").decode()


def duration(seconds: float) -> str:
    """`0 s`, `340 µs`, `12.3 ms`, `4.21 s`, `83.0 s`, `12:34`, `3:02:01`."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s" if seconds >= 9.995 else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def share(part: float, whole: float) -> str:
    """`71 %`, `0.4 %`, `0 %`; a dash if `whole` is 0."""
    if whole <= 0:
        return "–"
    percent = 100 * part / whole
    return f"{percent:.1f} %" if 0.05 <= percent < 9.95 else f"{percent:.0f} %"


def rate(per_second: float) -> str:
    """`0/s`, `0.42/s`, `3.1/s`, `1,234/s`."""
    if per_second <= 0:
        return "0/s"
    digits = 2 if per_second < 0.995 else 1 if per_second < 9.95 else 0
    return f"{per_second:,.{digits}f}/s"


def times(count: int, noun: str) -> str:
    """`1 step`, `1,234 steps`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def times_as_long(slowdown: float | None) -> str:
    """`1.42 ×`; a dash if it is not known."""
    return "–" if slowdown is None else f"{slowdown:.2f} ×"


def exceeded(report: Mapping[str, Any]) -> str:
    """`by 1.2 MB at most (3 times)`, for a report whose budget was exceeded."""
    count, most = times(report["over_budget"], "time"), report["exceeded_bytes"]
    return f"by {format_size_up(most)} at most ({count})" if most else count


def highest_budget(report: Mapping[str, Any]) -> int | None:
    """Return the largest budget that was in force, which is the one that the peak is compared with."""
    given: int | None = report["budget_bytes"]
    changes = report.get("budget_changes") or ()  # missing in reports of older versions
    return max([given, *(row["to_bytes"] for row in changes)]) if given else given


def change_words(row: Mapping[str, Any], *, several: bool) -> str:
    """`6 GB to 6.4 GB in step 3, after 8.1 s, for aten.addmm`.

    several: name the process.
    """
    sizes = f"{format_size(row['from_bytes'])} to {format_size(row['to_bytes'])}"
    who = "" if not several else f"{process_name(row)}: "
    when = f"in step {row['step']:,}, after {duration(row['seconds'])}"
    why = {"refused": "refused more", "free": "free again"}.get(row["reason"])
    if why is None:
        why = f"for {plain(row['operator'], 60)}"
    return f"{who}{sizes} {when}, {why}"


def process_name(process: Mapping[str, Any]) -> str:
    """`rank 1`, or `pid 4711` outside of torchrun and the like; of merged reports, `node0 pid 4711`."""
    rank, report = process["rank"], process.get("report")
    name = f"pid {process['pid']}" if rank is None else f"rank {plain(rank, 8)}"
    return f"{plain(report, 24)} {name}" if report else name


ALIKE = 1.02
"""Figures of processes that differ by less than this factor are alike."""


def extremes(report: Mapping[str, Any]) -> str:
    """`4; the largest peak: rank 3 (6.1 GB); the slowest: rank 1 (1.42 ×)`, of several processes."""
    processes = report["processes"]
    facts = [f"{len(processes):,}"]
    peaks = [one["peak_bytes"] for one in processes]
    if max(peaks) > ALIKE * min(peaks):
        largest = processes[peaks.index(max(peaks))]
        facts.append(f"the largest peak: {process_name(largest)} ({format_size(max(peaks))})")
    slowdowns = [slowdown_of(one) or 0.0 for one in processes]
    if max(slowdowns) > ALIKE * min(slowdowns):
        slowest = processes[slowdowns.index(max(slowdowns))]
        facts.append(f"the slowest: {process_name(slowest)} ({times_as_long(max(slowdowns))})")
    return "; ".join(facts) if len(facts) > 1 else f"{facts[0]}  (peaks and slowdowns are alike)"


def host_words(report: Mapping[str, Any]) -> str:
    """`1.2 GB out, 1.1 GB back in 0.8 s, at most 300 MB there (…)`; "" if nothing has left for the host."""
    host = report.get("host") or {}  # missing in reports of older versions
    if not host.get("copies_out"):
        return ""
    moved = f"{format_size(host['copied_out_bytes'])} out, {format_size(host['copied_in_bytes'])} back"
    there = f"at most {format_size(host['peak_bytes'])} there"
    text = f"{moved} in {duration(report['seconds']['host'])}, {there}"
    if state := host["left_peak_bytes"]:
        text += f"; state stays inside {format_size_up((highest_budget(report) or 0) + state)}"
    return text


def least_budget(report: Mapping[str, Any]) -> str:
    """Describe what is known about the least budget, for a report whose budget was too small."""
    error = report["error"] or {}
    hint = f". {error['hint']}" if error.get("hint") else ""
    return plain(advice_of(error, report["least_budget_bytes"] or 0) + hint, 800)


def slowdown_of(report: Mapping[str, Any]) -> float | None:
    """Return the slowdown of the steps, or of the whole run if it made none; None if there are too few."""
    of_steps: float | None = report.get("step_slowdown_estimate")  # missing in reports of older versions
    return report["slowdown_estimate"] if of_steps is None else of_steps


TOO_FEW = f"too few steps to say  (fewer than {ENOUGH_STEPS})"


def bound_words(report: Mapping[str, Any]) -> str:
    """`; host-bound`: on a GPU, what determines how long a step takes; empty on the CPU."""
    found = report.get("bound_by")  # missing in reports of older versions
    return f"; {found}-bound" if found in ("host", "device") else ""


def longest_seconds(report: Mapping[str, Any]) -> float:
    """Return the time of the process that took longest, from when the runtime became active."""
    return max((float(process["seconds"]["wall"]) for process in report["processes"]), default=0.0)


def native_share(report: Mapping[str, Any]) -> str | None:
    """`96.2 % of 1,300 operators`: the share handled in C++; None without the native part."""
    native = report.get("native")
    if not native or not native["operators"]:
        return None
    percent = 100 * (1 - native["in_python"] / native["operators"])
    return f"{percent:.1f} % of {times(native['operators'], 'operator')}"


RULES = {
    "first": "the default",
    "repeating": "the default for steps that are alike",
    "remembered": "learned by an earlier run",
    "searched": "learned from logged steps",
    "varying": "chosen because no two steps are alike",
    "worse": "kept: another one was worse",
    "thrashing": "changed: a step kept on recomputing",
}


def rule_of(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the rule of the first process that has one."""
    return next((rule for one in report["processes"] if (rule := one.get("rule"))), None)


def rule_words(rule: Mapping[str, Any]) -> str:
    """Name the heuristic of a run with `auto`; say where it comes from, and how much it recomputes."""
    facts = [RULES.get(rule["source"], plain(rule["source"], 30))]
    if (since := rule["since_step"]) is not None and since > 1:
        facts.append(f"since step {since:,}")
    if (share := rule["share"]) is not None:
        before = rule["share_before"]
        instead = "" if before is None else f" instead of {before:.0%}"
        facts.append(f"{share:.0%} of the step's own work is recomputed{instead}")
    elif (predicted := rule["predicted"]) is not None:
        facts.append(f"predicted: {max(predicted - 1, 0):.0%} of the step's own work is recomputed")
    return f"{plain(rule['heuristic'] or '–', 100)}  ({'; '.join(facts)})"


def counts_of(process: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a process's evictions, rematerializations and their time, steps, and slowdown."""
    return (
        f"{process['evictions']:,}",
        f"{process['rematerializations']:,}",
        duration(process["seconds"]["rematerialization"]),
        f"{process['steps']:,}",
        times_as_long(slowdown_of(process)),
    )
