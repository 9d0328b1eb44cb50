"""Formats numbers and names uniformly in all views."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dtrrun.telemetry.advice import advice_of

PLAIN = str.maketrans(
    {"×": "x", "·": "-", "…": "~", "–": "-", "─": "-", "µ": "u", "█": "#", "▓": "=", "░": ".", "≥": ">"}
)


SOURCE = {
    "nvml_pid": "NVML",
    "nvml_new_pid": "new pid",
    "device_delta": "device",
    "reserved_overhead": "estimate",
}
"""Short names of the sources of the driver's figures (`telemetry.driver.SOURCES`)."""


def plain(text: object, limit: int = 200) -> str:
    """Make a script's text safe to show: no control characters or line ends, limited length."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def words_of(command: Sequence[str], limit: int = 200) -> str:
    """Return a target's command, without the path of its interpreter."""
    first, *rest = command or [""]
    words = rest if rest and os.path.basename(first).startswith("python") else [first, *rest]
    return plain(" ".join(words), limit)


def for_encoding(text: str, encoding: str | None) -> str:
    """Return `text` without the characters that a stream of this encoding can't represent."""
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


def least_budget(report: Mapping[str, Any]) -> str:
    """Describe what is known of the least budget, for a report whose budget was too small."""
    error = report["error"] or {}
    return plain(advice_of(error, report["least_budget_bytes"] or 0), 400)


def counts_of(process: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a report's process: evictions, rematerializations and their time, steps, slowdown."""
    estimate = process["slowdown_estimate"]
    return (
        f"{process['evictions']:,}",
        f"{process['rematerializations']:,}",
        duration(process["seconds"]["rematerialization"]),
        f"{process['steps']:,}",
        "–" if estimate is None else f"{estimate:.2f} ×",
    )
