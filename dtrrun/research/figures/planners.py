"""DTR compared with static planners (Fig. 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .style import COLOURS, MARKERS, grid, legend, save, styled

Row = Mapping[str, Any]


def draw_planners(
    logs: Sequence[Row], rows: Sequence[Row], plans: Sequence[Row], folder: Path, format: str
) -> Path:
    """Draw one panel per log: heuristics as lines, planners as marks, slowdowns below the lower bound gray.

    Raises OSError.
    """
    logs = [log for log in logs if any(row["log"] == log["log"] for row in plans)]
    heuristics = list(dict.fromkeys(row["heuristic"] for row in rows))
    planners = list(dict.fromkeys(row["planner"] for row in plans if not _is_bound(row)))
    with styled():
        figure, axes = grid(len(logs), "Slowdown, beside static planners")
        for log, panel in zip(logs, axes, strict=True):
            for place, name in enumerate(heuristics):
                found = _points(rows, log, "heuristic", name)
                colour = COLOURS[place % len(COLOURS)]
                panel.plot(*found, color=colour, marker=MARKERS[place % len(MARKERS)], label=name)
            for place, name in enumerate(planners):
                found = _points(plans, log, "planner", name)
                panel.plot(
                    *found,
                    color=COLOURS[(place + 3) % len(COLOURS)],
                    marker=MARKERS[(place + 4) % len(MARKERS)],
                    markerfacecolor="none",
                    markersize=5,
                    linestyle="none",
                    label=name,
                )
            bounds = _points([row for row in plans if _is_bound(row)], log, "log", log["log"])
            if bounds[0]:
                panel.fill_between(bounds[0], 0, bounds[1], color="#ececec", label="no run: lower bound")
            panel.set(title=log["log"], xlim=(0, 1.03), ylim=(0.98, 2.02))
            panel.set(xlabel="budget / peak", ylabel="slowdown")
        legend(figure, axes)
        return save(figure, folder, "planners", format)


def _is_bound(row: Row) -> bool:
    return bool(row["planner"] == "lower_bound")


def _points(rows: Sequence[Row], log: Row, field: str, name: str) -> tuple[list[float], list[float]]:
    found = sorted(
        (row["budget_ratio"], row["overhead"])
        for row in rows
        if row["log"] == log["log"] and row[field] == name and row["overhead"] is not None
    )
    return [x for x, _ in found], [y for _, y in found]
