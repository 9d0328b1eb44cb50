"""The tables of `dtrrun simulate`: for each log, the overhead by heuristic and budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dtrrun.sizes import format_size
from dtrrun.views.panels import console_for, heading, print_to
from dtrrun.views.text import duration, plain

Row = Mapping[str, Any]
LEAST = 4
"""Minimum width of a budget's column, in characters."""
NOT_RUN = Text("–", style="dim")
"""Shown in place of a figure if the sweep was interrupted."""
BAD = {"oom": "red", "thrash": "yellow", "n/a": "dim"}


def print_simulation(result: Mapping[str, Any], stream: TextIO, *, width: int | None = None) -> None:
    """Write the tables of a `result` (see docs/simulator.md) to `stream`; in colour only on a terminal."""
    console = console_for(stream, width)
    print_to(stream, console, heading("dtrrun simulate"), *_sections(result, console.width))


def _sections(result: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    for index, log in enumerate(result["logs"]):
        rows = [row for row in result["rows"] if row["log"] == log["log"]]
        if index:
            yield ""
        yield Text.assemble(
            (plain(log["log"], 60), "bold"),
            f"  {log['operators']:,} operators in {duration(log['plain_seconds'])}, peak "
            f"{format_size(log['peak_bytes'])} (constants {format_size(log['constant_bytes'])}, largest "
            f"operator {format_size(log['largest_bytes'])})",
        )
        if rows:
            same_search = [row for row in rows if row["search"] == rows[0]["search"]]  # choices are the same
            yield overhead_table(same_search, width)
        if any(row.get("host_peak_bytes") for row in rows):
            yield ""
            yield host_table(rows, width)
        if found := [row for row in rows if row.get("settings", row["heuristic"]) != row["heuristic"]]:
            yield ""
            yield settings_table(found)
        if plans := [row for row in result.get("plans", ()) if row["log"] == log["log"]]:
            yield ""
            yield plans_table(plans, width)
        if any(row.get("accesses") is not None for row in rows):
            yield ""
            yield accesses_table([row for row in rows if row.get("accesses") is not None], width)


def label(row: Row, first: Row) -> str:
    """Return the heuristic and whatever else distinguishes the row's series from the `first` row's."""
    others = [str(row[field]) for field in ("deallocation", "search") if row[field] != first[field]]
    return ", ".join([str(row["heuristic"]), *others])


def series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each line of the table, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(label(row, rows[0]), []).append(row)
    return found


def overhead_table(rows: Sequence[Row], width: int) -> RenderableType:
    """Return one line per heuristic, one column per budget: total time over the time without a budget."""
    names = series(rows)
    cells = {name: {_budget(row): _overhead(row) for row in found} for name, found in names.items()}
    return _tables("overhead", rows, cells, width)


def host_table(rows: Sequence[Row], width: int) -> RenderableType:
    """Return what copies on the host took together, in the same layout."""
    cells = {
        name: {_budget(row): _on_host(row) for row in found if row["overhead"] is not None}
        for name, found in series(rows).items()
    }
    return _tables("on the host", rows, cells, width, missing=Text())


def _on_host(row: Row) -> Text:
    return Text(format_size(row["host_peak_bytes"]) if row.get("host_peak_bytes") else "")


def settings_table(rows: Sequence[Row]) -> Table:
    """Return the best settings that a portfolio found at each budget."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("best of portfolio", no_wrap=True)
    table.add_column("")
    for row in rows:
        table.add_row(_share(*_budget(row)), Text(plain(row["settings"], 80)))
    return table


def plans_table(rows: Sequence[Row], width: int) -> RenderableType:
    """Return one line per static planner: overhead of its plan, with `=` if optimal, `≥` for a bound."""
    planners = dict.fromkeys(row["planner"] for row in rows)
    cells = {one: {_budget(row): _plan(row) for row in rows if row["planner"] == one} for one in planners}
    return _tables("static planners", rows, cells, width)


def _plan(row: Row) -> Text:
    if row["overhead"] is None:
        return _overhead(row)
    mark = {"o": "=", "l": "≥"}.get(row["claim"][:1], "")  # optimal among …, lower bound on …, feasible
    return Text(f"{mark}{row['overhead']:.2f}")


def accesses_table(rows: Sequence[Row], width: int) -> RenderableType:
    """Return the storage accesses (App. D.3), in the same layout."""
    cells = {
        name: {_budget(row): Text(count(int(row["accesses"] or 0))) for row in found}
        for name, found in series(rows).items()
    }
    return _tables("accesses", rows, cells, width, missing=Text())


def count(number: int) -> str:
    """`950`, `9.5k`, `95k`, `950k`, `9.5M`: at most four characters."""
    if number < 1000:
        return str(number)
    for unit, letter in ((10**3, "k"), (10**6, "M"), (10**9, "G")):
        if number < 999.5 * unit or letter == "G":
            break
    return f"{number / unit:.1f}{letter}" if number < 9.95 * unit else f"{number / unit:.0f}{letter}"


def _tables(
    head: str,
    rows: Sequence[Row],
    cells: Mapping[str, Mapping[tuple[float, int], Text]],
    width: int,
    missing: Text = NOT_RUN,
) -> RenderableType:
    """Return a table of `cells` by line and budget, split into stacked tables if too wide for one.

    rows: those of all budgets.
    """
    first = max(map(len, [head, *cells])) + 1
    groups: list[list[tuple[float, int]]] = []
    room = 0
    for budget in dict.fromkeys(map(_budget, rows)):
        values = [found.get(budget, missing) for found in cells.values()]
        needed = max(LEAST, len(_share(*budget)), *map(len, values)) + 1
        if not groups or needed > room:
            groups.append([])
            room = width + 1 - first
        groups[-1].append(budget)
        room -= needed
    tables = []
    for group in groups:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        table.add_column(head, no_wrap=True, overflow="ellipsis", min_width=first - 1)
        for budget in group:
            table.add_column(_share(*budget), justify="right", no_wrap=True, min_width=LEAST)
        for name, found in cells.items():
            table.add_row(Text(plain(name, 40)), *(found.get(budget, missing) for budget in group))
        tables.append(table)
    return Group(*tables)


def _share(ratio: float, nbytes: int) -> str:
    exact = abs(ratio * 1000 - round(ratio * 1000)) < 1e-9  # a fraction, not a size
    return f"{100 * ratio:.3g}%" if exact else format_size(nbytes)


def _budget(row: Row) -> tuple[float, int]:
    return row["budget_ratio"], row["budget_bytes"]


def _overhead(row: Row) -> Text:
    if row["overhead"] is None:
        status = str(row["status"])
        return Text(status, style=BAD.get(status, "red"))
    return Text(f"{row['overhead']:.2f}")
