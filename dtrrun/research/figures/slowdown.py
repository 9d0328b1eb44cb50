"""Slowdown over budget (Fig. 2; also App. D.1 and D.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .style import COLOURS, MARKERS, grid, legend, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
BEFORE = {"thrash": "--", "oom": ":"}
"""The style of the line at the last budget before a run thrashes or runs out of memory."""


def draw_slowdown(
    logs: Sequence[Row],
    rows: Sequence[Row],
    name_of: Callable[[Row], str],
    title: str,
    folder: Path,
    name: str,
    format: str,
) -> Path:
    """Draw one panel per log, one line for each name that `name_of` gives the rows. Raises OSError."""
    names = list(dict.fromkeys(map(name_of, rows)))
    logs = [log for log in logs if any(row["log"] == log["log"] for row in rows)]
    with styled():
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        figure, axes = grid(len(logs), title)
        for log, panel in zip(logs, axes, strict=True):
            _shade(panel, log)
            for place, one in enumerate(names):
                found = [row for row in rows if row["log"] == log["log"] and name_of(row) == one]
                _line(panel, found, one, place)
            panel.set(title=log["log"], xlim=(0, 1.03), ylim=(0.98, 2.02))
            panel.set(xlabel="budget / peak", ylabel="slowdown")
        extra = [
            Line2D([], [], color="#555555", linestyle="--", label="thrashes below"),
            Line2D([], [], color="#555555", linestyle=":", label="out of memory below"),
            Patch(color="#000000", label="constants"),
            Patch(color="#c8c8c8", label="largest operator"),
        ]
        legend(figure, axes, extra=extra)
        return save(figure, folder, name, format)


def _shade(panel: Axes, log: Row) -> None:
    """Shade impossible budgets: less than the constants take, or than they and the largest operator take."""
    peak = log["peak_bytes"] or 1
    constants, largest = log["constant_bytes"] / peak, log["largest_bytes"] / peak
    panel.axvspan(0, constants, color="#000000", linewidth=0)
    panel.axvspan(constants, constants + largest, color="#c8c8c8", linewidth=0)


def _line(panel: Axes, rows: Sequence[Row], name: str, place: int) -> None:
    rows = sorted(rows, key=lambda row: -float(row["budget_ratio"]))
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    budgets = [row["budget_ratio"] for row in rows]
    slowdowns = [float("nan") if row["overhead"] is None else row["overhead"] for row in rows]
    panel.plot(budgets, slowdowns, color=colour, marker=marker, label=name, zorder=3)
    for row, below in pairwise(rows):
        if row["status"] == "ok" and below["status"] in BEFORE:
            beside = row["budget_ratio"] + 0.006 * (place - 2)  # several often end at the same budget
            style = BEFORE[below["status"]]
            panel.plot([beside] * 2, [row["overhead"], 2.02], color=colour, linestyle=style, linewidth=0.9)
            break
