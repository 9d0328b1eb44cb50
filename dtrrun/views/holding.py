"""What holds the peak of a run, as tables for a terminal (`dtrrun peak`, `--peak`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dtrrun.sizes import format_size
from dtrrun.telemetry import holding as words
from dtrrun.views.panels import console_for, heading, print_to
from dtrrun.views.text import duration, plain, share, times

MODULES, VARIABLES = 8, 6
"""How many rows these tables have; `--json` has all."""
SMALL = 0.005
"""Rows below this share of the peak are left out."""
NARROW = 70
"""Below this many columns, tables have fewer."""
NOT_SEEN = (
    "what holds the peak is not known: memory came to its peak only once (in the next step, there is a look)"
)

Row = Mapping[str, Any]


def print_peak(report: dict[str, Any], stream: TextIO, *, width: int | None = None) -> None:
    """Write what holds the peak of a run to `stream`; in colour only on a terminal."""
    console = console_for(stream, width)
    print_to(stream, console, heading("dtrrun peak"), *sections(report["holds"], console.width))


def sections(holds: Row | None, width: int) -> Iterator[RenderableType]:
    """Yield the tables, with blank lines in between."""
    if holds is None:
        yield Text(NOT_SEEN)
        return
    yield Text(headline(holds))
    yield _classes(holds, width)
    if rows := by_module(holds):
        yield ""
        yield _modules(rows, width)
    peak = int(holds["bytes"])
    variables = [row for row in holds["variables"] if int(row["bytes"]) >= SMALL * peak]
    if variables:
        yield ""
        yield _variables(variables, width)
    advice = [*remarks(holds)]
    if advice:
        yield ""
    for line in advice:
        yield Text(line)


def headline(holds: Row) -> str:
    """`peak 420 MB  step 3, backward, GPT train.py:64`."""
    place = " ".join(filter(None, (plain(holds["module"], 60), line_of(holds["line"]))))
    operator = plain(holds["operator"], 60)
    rank = "" if holds.get("rank") is None else f"rank {plain(holds['rank'], 8)}"
    where = [rank, f"step {holds['step']:,}", plain(holds["phase"], 20), place, operator]
    said = f"peak {format_size(holds['bytes'])}  {', '.join(filter(None, where))}"
    if holds["step_bytes"] > 1.005 * holds["bytes"]:
        said += f"  (that step's own peak was {format_size(holds['step_bytes'])})"
    return said


def line_of(line: Any) -> str:
    return plain(os.path.basename(str(line or "")), 60)


def _table(*labels: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for label in labels:
        number = label in ("bytes", "share", "again", "alike")
        table.add_column(label, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def _classes(holds: Row, width: int) -> Table:
    table = _table("class", "bytes", "share", "what to do")
    for name, size, of_all, remedy in words.rows_of(holds):
        table.add_row(plain(name, 30), size, of_all, remedy)
    table.columns[0].no_wrap = width >= NARROW
    return table


def short(module: str) -> str:
    """Return the part of a module's name up to the one below the first number: `blocks.*.mlp`."""
    parts = module.split(".")
    return ".".join(parts[: parts.index("*") + 2] if "*" in parts else parts[:2])


def by_module(holds: Row) -> list[dict[str, Any]]:
    """Return bytes by module, modules that are alike in one row, with the lines that made them."""
    found: dict[str, dict[str, Any]] = {}
    for row in holds["places"]:
        name = short(str(row["module"]))
        # What no module has called is told apart by its line.
        key = name or str(row["line"])
        into = found.setdefault(key, {"module": name, "alike": 1, "bytes": 0, "seconds": 0.0, "lines": {}})
        into["alike"] = max(into["alike"], int(row["alike"]))
        into["bytes"] += int(row["bytes"])
        into["seconds"] += float(row["recompute_seconds"])
        if row["line"]:
            into["lines"][str(row["line"])] = None
    least = SMALL * int(holds["bytes"])
    rows = [row for row in found.values() if row["bytes"] >= least and (row["module"] or row["lines"])]
    return sorted(rows, key=lambda row: -row["bytes"])[:MODULES]


def lines_of(lines: Iterable[str], most: int = 2) -> str:
    """Return places in files in short: `train.py:26-27, model.py:4`."""
    files: dict[str, list[int]] = {}
    for line in lines:
        name, _, number = os.path.basename(line).rpartition(":")
        if number.isdecimal():
            files.setdefault(name, []).append(int(number))
    shown = []
    for name, numbers in list(files.items())[:most]:
        first, last = min(numbers), max(numbers)
        shown.append(f"{plain(name, 30)}:{first}" + (f"-{last}" if last > first else ""))
    return ", ".join(shown) + (" …" if len(files) > most else "")


def _modules(rows: list[dict[str, Any]], width: int) -> Table:
    table = _table("module", *(["alike"] if width >= NARROW else []), "bytes", "line", "again")
    for row in rows:
        alike = [f"{row['alike']:,}" if row["alike"] > 1 else ""] if width >= NARROW else []
        again = duration(row["seconds"]) if row["seconds"] else ""
        name = plain(row["module"], 60) or "(no module)"
        table.add_row(name, *alike, format_size(row["bytes"]), lines_of(row["lines"]), again)
    return table


def _variables(rows: list[Row], width: int) -> Table:
    table = _table("kept by variables", "bytes", "where", "what to do")
    for row in rows[:VARIABLES]:
        remedy = words.variable_remedy({**row, "name": plain(row["name"], 40)})
        table.add_row(plain(row["name"], 40), format_size(row["bytes"]), plain(row["place"], 60), remedy)
    return table


def remarks(holds: Row) -> Iterator[str]:
    """Yield what one operator holds alone, and what can be had without dtrrun."""
    peak = int(holds["bytes"])
    if (one := holds["largest"]) is not None:
        place = " ".join(filter(None, (plain(one["module"], 60), line_of(one["line"]))))
        size = f"{format_size(one['bytes'])} ({share(one['bytes'], peak)})"
        if one["logits"]:
            rows, columns = one["logits"]
            yield (
                f"logits  {rows:,} x {columns:,} at {place}: {size} in {times(one['storages'], 'tensor')}. "
                "A loss that is computed in chunks of the batch, or fused with the last layer, takes a "
                "fraction of it"
            )
        else:
            yield f"alone  {plain(one['operator'], 60)} at {place} has made {size}"
    for plan in holds["plans"]:
        saved = share(plan["saved_bytes"], int(holds["step_bytes"]))
        yield (
            f"without dtrrun  checkpoint {plain(plan['modules'], 60)}: a peak of "
            f"{format_size(plan['peak_bytes'])}, {saved} less (torch.utils.checkpoint)"
        )
