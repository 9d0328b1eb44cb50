"""The table of `dtrrun simulate --theory`: operations by heuristic, for each size of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from dtrrun.views.panels import console_for, heading, print_to
from dtrrun.views.simulation import BAD
from dtrrun.views.text import plain

Row = Mapping[str, Any]

HEADS = {
    "linear": "Theorem 1: the linear network of App. A, N layers",
    "adversary": "Theorem 2: the adversary of App. B, N nodes",
}


def print_theory(result: Mapping[str, Any], stream: TextIO, *, width: int | None = None) -> None:
    """Write the table of a `result` (see docs/simulator.md) to `stream`; in colour only on a terminal."""
    head = Text.assemble((HEADS[result["theory"]], "bold"), ", in a memory of B tensors")
    print_to(
        stream, console_for(stream, width), heading("dtrrun simulate"), head, theory_table(result["rows"])
    )


def theory_table(rows: Sequence[Row]) -> Table:
    """Return one line for each N, B and heuristic, with the optimum of a static plan."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for head in ("N", "B", "N/B", "optimum"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("heuristic", no_wrap=True, overflow="ellipsis")
    for head in ("operations", "/ N", "/ optimum"):
        table.add_column(head, justify="right", no_wrap=True)
    before: tuple[int, int] | None = None
    for row in rows:
        nodes, budget = network = row["nodes"], row["budget"]
        facts = (f"{nodes:,}", f"{budget:,}", f"{nodes / budget:.4g}", f"{row['optimum']:,}")
        if network == before:
            facts = ("",) * 4
        before = network
        table.add_row(*facts, Text(plain(row["heuristic"], 30)), *_operations(row))
    return table


def _operations(row: Row) -> tuple[Text, ...]:
    if row["operations"] is None:
        return Text(row["status"], style=BAD.get(row["status"], "red")), Text(), Text()
    return tuple(map(Text, (f"{row['operations']:,}", f"{row['per_node']:.2f}", f"{row['ratio']:.2f}")))
