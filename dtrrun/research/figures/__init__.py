"""The paper's figures, drawn from the result of a sweep (docs/simulator.md explains them)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrrun.simulator.schedule import read_schedule

from .accesses import draw_accesses
from .planners import draw_planners
from .slowdown import draw_slowdown
from .style import FORMATS, MissingMatplotlib, need_matplotlib
from .theory import draw_theory
from .trace import draw_trace

__all__ = ["FORMATS", "MissingMatplotlib", "draw", "draw_theory", "need_matplotlib"]

ABLATIONS = {
    "e_star": "e*",
    "eqclass": "ẽ* (EqClass)",
    "local": "local cost",
    "no": "no cost",
}


def draw(result: Mapping[str, Any], folder: Path, format: str = "svg") -> list[Path]:
    """Draw every picture for which `result` has data, and return the files.

    These are heuristics compared (Fig. 2), ablations (App. D.1), deallocations (D.2), accesses (D.3), static
    planners (Fig. 3), and a trace of each log with its first heuristic, at the least budget that worked.
    Raises OSError, MissingMatplotlib.
    """
    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    logs, rows = result["logs"], result["rows"]
    first = _first_of_each(rows)
    made = []
    if heuristics := [row for row in first if not row["heuristic"].startswith("h'")]:
        title = "Slowdown by heuristic"
        made.append(draw_slowdown(logs, heuristics, _heuristic, title, folder, "slowdown", format))
    for cost, words in ABLATIONS.items():
        if ablated := [row for row in first if row["heuristic"].endswith(f"c={cost})")]:
            title, name = f"h′(s, m, c) with c = {words}", f"ablation-{cost}"
            made.append(draw_slowdown(logs, ablated, _ablation, title, folder, name, format))
    for heuristic in dict.fromkeys(_heuristic(row) for row in rows):
        same = [row for row in rows if row["heuristic"] == heuristic and row["search"] == rows[0]["search"]]
        if len({row["deallocation"] for row in same}) > 1:
            title, name = f"{heuristic} by deallocation", f"deallocation-{_as_name(heuristic)}"
            made.append(draw_slowdown(logs, same, _deallocation, title, folder, name, format))
    if any(row["accesses"] is not None for row in rows):
        eager = [row for row in rows if row["deallocation"] == rows[0]["deallocation"]]
        made.append(draw_accesses(logs, eager, folder, format))
    if plans := result.get("plans"):
        made.append(draw_planners(logs, heuristics, plans, folder, format))
    for log in logs:
        if done := [row for row in first if row["log"] == log["log"] and row["status"] == "ok"]:
            least = min(
                (row for row in done if row["heuristic"] == done[0]["heuristic"]),
                key=lambda row: float(row["budget_ratio"]),
            )
            title = f"{log['log']}: {least['heuristic']} in {least['budget_ratio']:.0%} of the peak"
            name = f"trace-{_as_name(log['log'])}"
            schedule = read_schedule(log["path"])
            made.append(
                draw_trace(schedule, least["budget_bytes"], least["heuristic"], title, folder, name, format)
            )
    return made


def _heuristic(row: Mapping[str, Any]) -> str:
    return str(row["heuristic"])


def _ablation(row: Mapping[str, Any]) -> str:
    """Shorten `h'(s=yes,m=no,c=local)` to `s=yes, m=no`."""
    return ", ".join(str(row["heuristic"])[3:-1].split(",")[:2])


def _deallocation(row: Mapping[str, Any]) -> str:
    return str(row["deallocation"])


def _first_of_each(rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one row for each log, heuristic and budget: that of the first deallocation and search."""
    found: dict[Any, Mapping[str, Any]] = {}
    for row in rows:
        found.setdefault((row["log"], row["heuristic"], row["budget_ratio"]), row)
    return list(found.values())


def _as_name(text: str) -> str:
    """Return text suitable for a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-")
