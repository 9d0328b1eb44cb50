"""Pictures of the theorems: operations against N, App. A's trace, the adversary's ratio over N/B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf, sqrt
from pathlib import Path
from typing import Any

from ..theory.recorded import linear_schedule
from .style import COLOURS, MARKERS, grid, legend, need_matplotlib, save, styled
from .trace import trace

Row = Mapping[str, Any]

TRACED = 200
"""N of the trace, as in the paper."""
EVICTED, FORWARD, GRADIENT = 0, 1, 2


def draw_theory(result: Mapping[str, Any], folder: Path, format: str = "svg") -> list[Path]:
    """Draw the rows of `dtrrun simulate --theory`, and return the files.

    The trace shows the first heuristic. Raises OSError, MissingMatplotlib.
    """
    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in result["rows"] if row["status"] == "ok"]
    if result["theory"] == "adversary":
        return [draw_adversary(rows, folder, format)]
    return [
        draw_linear(rows, folder, format),
        draw_linear_trace(result["rows"][0]["heuristic"], folder, format),
    ]


def draw_linear(rows: Sequence[Row], folder: Path, format: str) -> Path:
    """Draw operations over N, absolute and per layer, with the binomial optimum. Raises OSError."""
    with styled():
        figure, (left, right) = grid(2, "Theorem 1: operations on a linear network")
        for place, ((name, budget), found) in enumerate(_series(rows, fixed=_is_fixed(rows)).items()):
            look = _look(place)
            label = name if budget is None else f"{name}, B = {budget}"
            nodes = [row["nodes"] for row in found]
            left.plot(nodes, [row["operations"] for row in found], label=label, **look)
            right.plot(nodes, [row["per_node"] for row in found], label=label, **look)
        best = {row["nodes"]: row["optimum"] for row in sorted(rows, key=lambda row: -int(row["optimum"]))}
        sizes = sorted(best)
        dashed: dict[str, Any] = {"color": "#555555", "linestyle": "--", "linewidth": 0.9, "label": "optimum"}
        left.plot(sizes, [best[nodes] for nodes in sizes], **dashed)
        right.plot(sizes, [best[nodes] / nodes for nodes in sizes], **dashed)
        left.set(xscale="log", yscale="log", xlabel="N", ylabel="operations")
        right.set(xscale="log", ylim=(0, None), xlabel="N", ylabel="operations / N")
        legend(figure, [left])
        return save(figure, folder, "theory-linear", format)


def draw_adversary(rows: Sequence[Row], folder: Path, format: str) -> Path:
    """Draw operations relative to the optimum over N/B, and the proved bound. Raises OSError."""
    with styled():
        figure, (panel,) = grid(1, "Theorem 2: against the adversary")
        figure.set_size_inches(5, 3.6)
        for place, ((name, budget), found) in enumerate(_series(rows, fixed=True).items()):
            shares = [row["nodes"] / row["budget"] for row in found]
            ratios = [row["ratio"] for row in found]
            panel.plot(shares, ratios, label=f"{name}, B = {budget}", alpha=0.7, **_look(place))
        shares = sorted({row["nodes"] / row["budget"] for row in rows})
        half = [share / 2 for share in shares]
        panel.plot(shares, half, color="#555555", linestyle="--", linewidth=0.9, label="N / (2 B)")
        panel.set(xscale="log", yscale="log", xlabel="N / B", ylabel="operations / optimum")
        legend(figure, [panel])
        return save(figure, folder, "theory-adversary", format)


def draw_linear_trace(heuristic: str, folder: Path, format: str, layers: int = TRACED) -> Path:
    """Draw which t_i and t̂_i are in memory after each operation, for B = 2⌈√N⌉ (App. A's figure).

    Raises OSError.
    """
    budget = 2 * ceil(sqrt(layers))
    picture, turn = resident_tensors(heuristic, layers, budget)
    with styled():
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        colours = ["#ffffff", COLOURS[0], COLOURS[1]]
        figure, (panel,) = grid(1, f"Theorem 1: {heuristic} in memory, N = {layers}, B = {budget}")
        figure.set_size_inches(7, 4)
        look: dict[str, Any] = {"cmap": ListedColormap(colours), "vmin": EVICTED, "vmax": GRADIENT}
        extent = (0, len(picture[0]), layers + 0.5, 0.5)
        panel.imshow(picture, aspect="auto", interpolation="nearest", extent=extent, **look)
        panel.axvline(turn, color="#000000", linestyle="--", linewidth=0.9)
        panel.grid(visible=False)
        panel.set(xlabel="operations; dashed: the backward pass begins", ylabel="layer i")
        held = [
            Patch(color=colours[FORWARD], label="t of the layer"),
            Patch(color=colours[GRADIENT], label="t̂"),
        ]
        legend(figure, [panel], extra=held)
        return save(figure, folder, "theory-trace", format)


def resident_tensors(heuristic: str, layers: int, budget: int) -> tuple[list[list[int]], int]:
    """Return, by layer, what was in memory during each operation, and how many ran before the backward pass.

    Each entry is EVICTED, FORWARD or GRADIENT; if a layer has both tensors in memory, FORWARD.
    """
    found = trace(linear_schedule(layers), budget, heuristic, "banish", limit=inf)
    picture = [[EVICTED] * found.end for _ in range(layers)]
    turn = found.end
    for place, begin, until, again in sorted(found.spans, reverse=True):  # forward values on top
        forward = place < layers
        layer = place if forward else 2 * layers - 1 - place
        if place == layers and not again:
            turn = begin - 1
        for time in range(begin - 1, until):  # its own operation ends at `begin`
            picture[layer][time] = FORWARD if forward else GRADIENT
    return picture, turn


def _is_fixed(rows: Sequence[Row]) -> bool:
    """Return whether budgets were given, that is, whether some N has several."""
    budgets: dict[int, set[int]] = {}
    for row in rows:
        budgets.setdefault(row["nodes"], set()).add(row["budget"])
    return any(len(some) > 1 for some in budgets.values())


def _series(rows: Sequence[Row], fixed: bool) -> dict[tuple[str, int | None], list[Row]]:
    """Return the rows of each line, by heuristic and, if `fixed`, budget."""
    found: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        found.setdefault((row["heuristic"], row["budget"] if fixed else None), []).append(row)
    return found


def _look(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
