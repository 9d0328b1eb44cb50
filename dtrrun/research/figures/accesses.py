"""Storage accesses over budget (App. D.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .style import COLOURS, MARKERS, grid, legend, save, styled

LINES = {"heap": "-", "scan": "--"}


def draw_accesses(
    logs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], folder: Path, format: str
) -> Path:
    """Draw one panel per log, one line per heuristic and search, for rows with counts. Raises OSError."""
    rows = [row for row in rows if row["accesses"] is not None]
    logs = [log for log in logs if any(row["log"] == log["log"] for row in rows)]
    heuristics = list(dict.fromkeys(row["heuristic"] for row in rows))
    with styled():
        figure, axes = grid(len(logs), "Storage accesses by the policy")
        for log, panel in zip(logs, axes, strict=True):
            for place, heuristic in enumerate(heuristics):
                for search, line in LINES.items():
                    found = [
                        (row["budget_ratio"], max(row["accesses"], 1))
                        for row in rows
                        if (row["log"], row["heuristic"], row["search"]) == (log["log"], heuristic, search)
                        and row["status"] == "ok"
                    ]
                    if found:
                        panel.plot(
                            *zip(*sorted(found), strict=True),
                            color=COLOURS[place % len(COLOURS)],
                            marker=MARKERS[place % len(MARKERS)],
                            linestyle=line,
                            label=f"{heuristic}, {search}",
                        )
            panel.set(title=log["log"], xlim=(0, 1.03), yscale="log")
            panel.set(xlabel="budget / peak", ylabel="storage accesses")
        legend(figure, axes)
        return save(figure, folder, "accesses", format)
