"""Tables in Markdown, for pull requests and the summaries of CI jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtrrun.sizes import format_size, format_size_up
from dtrrun.views.text import duration, plain, times_as_long

ESCAPES = str.maketrans({"|": "\\|", "<": "&lt;", ">": "&gt;", "`": "'", "*": "\\*", "_": "\\_", "[": "\\["})


def escaped(text: object, limit: int = 200) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return plain(text, limit).translate(ESCAPES)


def table(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. The first column is aligned left, the others right."""
    lines = [
        labels,
        [":--", *(["--:"] * (len(labels) - 1))],
        *([escaped(cell) for cell in row] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def of_smoke(title: str, checks: Sequence[Mapping[str, Any]], passed: bool) -> str:
    """Return the checks of `dtrrun smoke`."""
    words = {True: "ok", False: "**failed**", None: "skipped"}
    head = f"### dtrrun smoke: {escaped(title)}: {'ok' if passed else 'failed'}\n\n"
    lines = ["| check | | |\n| :-- | :-- | :-- |\n"]
    lines += [
        f"| {escaped(check['name'])} | {words[check['passed']]} | {escaped(check['detail'], 400)} |\n"
        for check in checks
    ]
    return head + "".join(lines)


def _certain(result: Mapping[str, Any]) -> str:
    if result["certain"] is None:
        return ""
    return f"; {result['certain']:,} also works in {format_size(result['margin_budget_bytes'])}"


def of_profile(result: Mapping[str, Any]) -> str:
    """Return what `dtrrun profile` has found (docs/profile.md)."""
    head = f"### dtrrun profile: {escaped(' '.join(result['target']))}\n\n"
    if "vary" in result:
        rows = [
            (
                f"{row['value']:,}",
                format_size(row["peak_bytes"]),
                times_as_long(row["slowdown"]),
                row["status"],
            )
            for row in result["values"]
        ]
        largest = "none fits" if result["largest"] is None else f"the largest is {result['largest']:,}"
        said = f"In {format_size(result['target_budget_bytes'])}, {largest}{_certain(result)}.\n\n"
        return head + said + table((escaped(" ".join(result["vary"])), "peak", "slowdown", "status"), rows)
    peak = result["plain_peak_bytes"]
    if peak is None:
        return head + "Nothing was found.\n"
    facts = [("plain peak", format_size(peak)), ("plain step", duration(result["plain_step_seconds"]))]
    for label in ("minimum", "recommended"):
        if (found := result[f"{label}_bytes"]) is not None:
            needs = result.get(f"{label}_host_bytes")
            more = f", needs {format_size_up(needs)} of host memory" if needs else ""
            facts.append((label, f"{format_size(found)} ({100 * found / peak:.0f} %){more}"))
    points = [
        (
            format_size(point["budget_bytes"]),
            times_as_long(point["predicted"]["slowdown"]),
            times_as_long(point["measured"]["slowdown"] if point["measured"] else None),
            (point["measured"] or point["predicted"])["status"],
        )
        for point in result["points"]
    ]
    return head + table(("", ""), facts) + "\n" + table(("budget", "predicted", "measured", "status"), points)
