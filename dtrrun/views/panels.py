"""The components of the live and the final table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dtrrun.sizes import format_size
from dtrrun.telemetry.fields import PARTS, SOMETIMES
from dtrrun.views.figures import Row
from dtrrun.views.text import duration, for_encoding, plain, share

PARTS_SHOWN = {  # the paper's Fig. 4: name, short name, colour
    "operators": ("operators", "operators", "green"),
    "rematerialization": ("rematerialization", "remat.", "yellow"),
    "scoring": ("scoring", "scoring", "magenta"),
    "search": ("search", "search", "blue"),
    "bookkeeping": ("bookkeeping", "bookkeeping", "cyan"),
    "allocator": ("allocator", "allocator", "red"),
    "host": ("host copies", "host", "bright_black"),
    "other": ("rest", "rest", ""),
}
assert tuple(PARTS_SHOWN) == (*PARTS, "other")

BAR = "█▓░"  # pinned, evictable, free: distinguishable without colour
PINNED, EVICTABLE, FREE, OVER = "blue", "green", "dim", "bold red"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise: rich's default exits with status 1, even if the command has more to do."""
        raise BrokenPipeError


def console_for(stream: TextIO, width: int | None, live: bool = False) -> Console:
    """Return a console that treats text literally: no markup, emoji or highlighting."""
    return _Console(
        file=stream,
        width=width,
        force_terminal=True if live else None,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def print_to(stream: TextIO, console: Console, *parts: RenderableType) -> None:
    """Write `parts` one below the other, without trailing blanks, in what `stream` can encode."""
    with console.capture() as capture:
        console.print(Group(*parts))
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    stream.write(for_encoding(text + "\n", stream.encoding))
    stream.flush()


def heading(command: str) -> Rule:
    """Return the line above the tables of a command."""
    return Rule(command, style="dim", align="left", characters="─")


def facts_table(facts: Mapping[str, str | Text], overflow: OverflowMethod = "ellipsis") -> Table:
    """Return a table of facts by label. overflow: of words that are longer than a line."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow=overflow)
    for label, fact in facts.items():
        table.add_row(label, Text(fact) if isinstance(fact, str) else fact)
    return table


def columns_table(*labels: str) -> Table:
    """Return a table without borders: the first column left-aligned, numbers right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for index, label in enumerate(labels):
        table.add_column(label, justify="right" if index else "left", no_wrap=True, overflow="ellipsis")
    return table


def fitting(width: int, *tables: Table) -> Table:
    """Return the first table that fits into `width` columns, or the last if none does."""
    unlimited = Console(width=10_000)
    return next((one for one in tables if unlimited.measure(one).maximum <= width), tables[-1])


def rows_table(rows: Iterable[Mapping[str, str | Text]], names: Sequence[str]) -> Table:
    """Return a table of rows by column. The name of a `status` is not shown."""
    table = columns_table(*("" if name == "status" else name for name in names))
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def narrowed(
    width: int,
    rows: Sequence[Mapping[str, str | Text]],
    names: Sequence[str],
    left_out: Sequence[str],
    *wider: Table,
) -> Table:
    """Return a table of rows without the columns that do not fit, as few as possible from `left_out`.

    wider: tables that are better, if one of them fits.
    """
    tables = [*wider, rows_table(rows, names)]
    for name in left_out:
        names = [one for one in names if one != name]
        tables.append(rows_table(rows, names))
    return fitting(width, *tables)


def memory_bar(pinned: int, evictable: int, resident: int, whole: int, width: int) -> Text:
    """Return a bar of resident bytes relative to the budget (`whole`)."""
    scale = width / max(whole, resident, 1)
    full = round(resident * scale)
    dark = min(full, round(pinned * scale))
    return Text.assemble(
        (BAR[0] * dark, PINNED),
        (BAR[1] * (full - dark), OVER if resident > whole else EVICTABLE),
        (BAR[2] * (width - full), FREE),
    )


OURS = ("scoring", "search", "bookkeeping")
"""Parts that are combined where there is little room."""


def breakdown_table(
    rows: Sequence[tuple[str, Mapping[str, float]]], width: int, short: bool = False
) -> Table:
    """Return one line per row: its total time, and the percentage of each part.

    short: use short names even if there is room.
    """
    parts = {
        part: shown
        for part, shown in PARTS_SHOWN.items()
        if part not in SOMETIMES or any(seconds.get(part) for _, seconds in rows)
    }
    each: dict[tuple[str, ...], tuple[str, str, str]] = {(part,): one for part, one in parts.items()}
    few: dict[tuple[str, ...], tuple[str, str, str]] = {}
    for part, shown in parts.items():
        if part not in OURS:
            few[part,] = shown
        elif OURS not in few:
            few[OURS] = ("dtrrun", "dtrrun", "cyan")
    tables = [_breakdown(rows, each, short=True), _breakdown(rows, few, short=True)]
    return fitting(width, *([] if short else [_breakdown(rows, each, short=False)]), *tables)


def _breakdown(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    shown: Mapping[tuple[str, ...], tuple[str, str, str]],
    short: bool,
) -> Table:
    table = columns_table("time", "")
    for label, short_label, colour in shown.values():
        table.add_column(
            Text(short_label if short else label, style=colour), justify="right", no_wrap=True, min_width=5
        )
    for label, seconds in rows:
        shares = (share(sum(seconds[part] for part in parts), seconds["wall"]) for parts in shown)
        table.add_row(Text(label), duration(seconds["wall"]), *shares)
    return table


def rematerialized(rows: Sequence[Row]) -> list[Row]:
    """Return the operators that were not only evicted, but also run again."""
    return [row for row in rows if row.get("rematerializations")]


def operators_table(rows: Sequence[Row], count: int, width: int) -> Table:
    """Return the costliest operators to rematerialize; below 60 columns, without their bytes."""
    labels = ["costliest to rematerialize", "times", "cost", "bytes"][: 4 if width >= 60 else 3]
    table = columns_table(*labels)
    for row in rows[:count]:
        cells = (
            f"{row.get('rematerializations') or 0:,}",
            duration(row.get("seconds") or 0),
            format_size(int(row.get("bytes") or 0)),
        )
        table.add_row(Text(plain(row.get("name"), width - 9 * len(labels[1:]))), *cells[: len(labels) - 1])
    return table


def places_table(rows: Sequence[Row], count: int, width: int) -> Table:
    """Return where the program called the costliest operators to rematerialize."""
    table = columns_table("called from", "times", "cost")
    for row in rows[:count]:
        module, line = plain(row.get("module") or "", 60), plain(os.path.basename(row.get("line") or ""), 40)
        place = " ".join(filter(None, (module, line, plain(row.get("name"), 40))))
        cells = f"{row.get('rematerializations') or 0:,}", duration(row.get("seconds") or 0)
        table.add_row(Text(plain(place, width - 18)), *cells)
    return table
