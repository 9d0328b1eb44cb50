"""Two reports side by side: what changed from one run to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TextIO

from rich.console import RenderableType

from dtrrun.sizes import format_size
from dtrrun.telemetry.fields import PARTS
from dtrrun.views import markdown
from dtrrun.views.panels import columns_table, console_for, heading, print_to
from dtrrun.views.text import duration, longest_seconds, plain, times_as_long, words_of

MOST = 8
"""Maximum rows of operators."""
SAME = 0.005
"""A change of less than this share is none: times are never the same twice."""

Report = Mapping[str, Any]


class Section(NamedTuple):
    """A table: labels, and rows whose cells are text."""

    title: str
    labels: tuple[str, ...]
    rows: list[tuple[str, ...]]


def compared(before: Report, after: Report) -> list[Section]:
    """Return the tables of two reports (docs/report.md) that have anything to show.

    Reports read from files may have invalid values, which raise KeyError, TypeError or ValueError.
    """
    sections = [
        Section("", ("", "before", "after", "change"), [*_figures(before, after)]),
        Section("time per step", ("part", "before", "after", "change"), [*_times(before, after)]),
        Section("peak by class", ("class", "before", "after", "change"), [*_classes(before, after)]),
        Section("evictions that changed", ("", "before", "after", "change"), [*_evictions(before, after)]),
        Section("different", ("", "before", "after"), [*_different(before, after)]),
    ]
    return [section for section in sections if section.rows]


def growth(before: Report, after: Report) -> float:
    """Return by what share the peak has grown; negative if it has become less."""
    was, now = int(before["peak_bytes"]), int(after["peak_bytes"])
    return (now - was) / was if was else float(now > 0)


def print_comparison(before: Report, after: Report, stream: TextIO) -> None:
    console = console_for(stream, None)
    print_to(stream, console, heading("dtrrun compare"), *_parts(compared(before, after), console.width))


def as_markdown(before: Report, after: Report) -> str:
    """Return the comparison for a pull request."""
    command = markdown.escaped(words_of([str(word) for word in after["command"]]))
    found = [f"### dtrrun compare: {command}\n"]
    for section in compared(before, after):
        title = f"**{section.title}**\n\n" if section.title else ""
        found.append(title + markdown.table(section.labels, section.rows))
    return "\n".join(found)


def _parts(sections: list[Section], width: int) -> Iterator[RenderableType]:
    for place, section in enumerate(sections):
        if place:
            yield ""
        table = columns_table(section.title or section.labels[0], *section.labels[1:])
        longest = max(width - 13 * len(section.labels[1:]), 12)
        for name, *cells in section.rows:
            table.add_row(plain(name, longest), *(plain(cell, 40) for cell in cells))
        yield table


def _row(name: str, was: Any, now: Any, shown: Callable[[Any], str]) -> tuple[str, ...]:
    return name, "–" if was is None else shown(was), "–" if now is None else shown(now), _change(was, now)


def _change(was: Any, now: Any) -> str:
    """`+12 %`, `-3.1 %`, `same`, or empty if there is nothing to compare."""
    if was is None or now is None or isinstance(was, bool):
        return ""
    if was == now or (was and abs(now - was) < SAME * abs(was)):
        return "same"
    if not was:
        return "new"
    percent = 100 * (now - was) / was
    return f"{percent:+.1f} %" if abs(percent) < 10 else f"{percent:+,.0f} %"


def _count(value: Any) -> str:
    return f"{value:,}"


FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("peak", "peak_bytes", format_size),
    ("driver's peak", "driver_peak_bytes", format_size),
    ("process", "process_peak_bytes", format_size),
    ("budget", "budget_bytes", format_size),
    ("slowdown", "step_slowdown_estimate", times_as_long),
    ("evictions", "evictions", _count),
    ("evicted", "evicted_bytes", format_size),
    ("rematerializations", "rematerializations", _count),
    ("rematerialized", "rematerialized_bytes", format_size),
    ("over budget", "over_budget", _count),
    ("steps", "steps", _count),
    ("exit status", "exit_code", _count),
)


def _figures(before: Report, after: Report) -> Iterator[tuple[str, ...]]:
    for name, key, shown in FIGURES:
        was, now = before.get(key), after.get(key)
        if was or now or key == "peak_bytes":
            yield _row(name, was, now, shown)
    yield _row("time", longest_seconds(before), longest_seconds(after), duration)


def _times(before: Report, after: Report) -> Iterator[tuple[str, ...]]:
    if not before["steps"] or not after["steps"]:
        return

    def each(report: Report, part: str) -> float:
        return float(report["seconds"].get(part, 0.0)) / int(report["steps"])

    for part in ("wall", *PARTS, "other"):
        was, now = each(before, part), each(after, part)
        if was or now:
            yield _row("in all" if part == "wall" else part, was, now, duration)


def _classes(before: Report, after: Report) -> Iterator[tuple[str, ...]]:
    """What holds the peak (`--peak`), if both reports say it."""
    was, now = before.get("holds"), after.get("holds")
    if not was or not now:
        return
    old, new = ({row["name"]: int(row["bytes"]) for row in one["classes"]} for one in (was, now))
    for name in sorted({*old, *new}, key=lambda name: -max(old.get(name, 0), new.get(name, 0))):
        yield _row(plain(name, 40), old.get(name, 0), new.get(name, 0), format_size)


def _evictions(before: Report, after: Report) -> Iterator[tuple[str, ...]]:
    old, new = (
        {str(row["name"]): int(row.get("evictions") or 0) for row in one["operators"]}
        for one in (before, after)
    )
    names = [name for name in {*old, *new} if old.get(name, 0) != new.get(name, 0)]
    order = sorted(names, key=lambda name: (-abs(new.get(name, 0) - old.get(name, 0)), name))
    for name in order[:MOST]:
        yield _row(name, old.get(name, 0), new.get(name, 0), _count)


def _different(before: Report, after: Report) -> Iterator[tuple[str, ...]]:
    """Yield what else is different: the command, settings, and versions."""
    facts = [("command", *(words_of([str(word) for word in one["command"]]) for one in (before, after)))]
    for name in dict.fromkeys((*before["settings"], *after["settings"])):
        facts.append((name, before["settings"].get(name), after["settings"].get(name)))
    for name in ("torch", "device"):
        facts.append((name, *(_of_first(one, name) for one in (before, after))))
    for name, was, now in facts:
        if was != now and name != "budget_bytes":
            yield name, "–" if was is None else str(was), "–" if now is None else str(now)


def _of_first(report: Report, name: str) -> Any:
    processes = report["processes"]
    return processes[0].get(name) if processes else None
