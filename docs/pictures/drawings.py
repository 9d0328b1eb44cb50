"""The drawings of README.md and docs/how-it-works.md, in the style of the simulator's pictures.

`python docs/pictures/drawings.py [FOLDER]`. The idea and the times are of the runs in runs.json, the chain
is a replay by the simulator, and the versions are drawn by hand.
"""

from __future__ import annotations

import json
import sys
from math import inf
from pathlib import Path
from typing import Any

from dtrrun.research.figures.style import COLOURS, grid, legend, save, styled
from dtrrun.research.figures.trace import trace
from dtrrun.research.theory.recorded import linear_schedule
from dtrrun.sizes import as_bytes

HERE = Path(__file__).parent
LAYERS, BUDGET = 8, 5
FIRST, AGAIN, GRADIENT = COLOURS[4], COLOURS[1], "#c9c9c9"
WITHOUT, WITHIN, ON_BOTH = "#d55e00", "#0090d0", "#768390"
"""Colours of the idea, which can be read on white and on black."""
PARTS = ("operators", "rematerialization", "scoring", "search", "bookkeeping", "other")
LABELS = ("operators", "rematerialization", "scoring", "search", "bookkeeping", "rest")
SHADES = (COLOURS[2], COLOURS[1], COLOURS[3], COLOURS[0], COLOURS[4], "#d9d9d9")


def main(folder: Path) -> None:
    with styled():
        idea(folder)
        chain(folder)
        versions(folder)
        times(folder)


def idea(folder: Path) -> None:
    """Memory over one step, without a budget and with one. Legible on light and on dark pages."""
    plain, within = json.loads((HERE / "runs.json").read_text())["step"]
    figure, (panel,) = grid(1, "")
    figure.set_size_inches(6.4, 2.6)
    figure.patch.set_alpha(0)
    panel.patch.set_alpha(0)
    limit = as_bytes(within["budget"]) / 1e6
    for run, colour in ((plain, WITHOUT), (within, WITHIN)):
        times, held = [at for at, _ in run["bytes"]], [nbytes / 1e6 for _, nbytes in run["bytes"]]
        panel.fill_between(times, held, color=colour, alpha=0.18, linewidth=0)
        panel.plot(times, held, color=colour, linewidth=1.4)
    panel.axhline(limit, color=ON_BOTH, linestyle="--", linewidth=1)
    peak, most = max(plain["bytes"], key=lambda one: one[1])
    most, end = most / 1e6, max(run["milliseconds"] for run in (plain, within))
    panel.text(peak + end / 25, most, "without a budget", color=WITHOUT, va="top", fontsize=9)
    panel.text(
        end * 0.99,
        limit + 8,
        f"inside {within['budget'].replace('MB', ' MB')}",
        color=WITHIN,
        ha="right",
        fontsize=9,
    )
    panel.text(end * 0.01, limit + 8, "budget", color=ON_BOTH, fontsize=8)
    panel.text(peak / 2, most * 0.05, "forward pass", color=ON_BOTH, ha="center", fontsize=8)
    panel.text(
        (peak + plain["milliseconds"]) / 2,
        most * 0.05,
        "backward pass",
        color=ON_BOTH,
        ha="center",
        fontsize=8,
    )
    panel.set(
        xlabel="processor time in one training step, ms",
        ylabel="tensor memory, MB",
        xlim=(0, end),
        ylim=(0, most * 1.04),
    )
    panel.grid(visible=False)
    panel.tick_params(colors=ON_BOTH)
    for part in (panel.xaxis.label, panel.yaxis.label):
        part.set_color(ON_BOTH)
    for side in panel.spines.values():
        side.set_color(ON_BOTH)
    save(figure, folder, "idea", "svg")


def chain(folder: Path) -> None:
    """What is in memory while each operator of a small linear network runs."""
    from matplotlib.patches import Patch

    found = trace(linear_schedule(LAYERS), BUDGET, "h_dtr_eq", limit=inf)
    figure, (panel,) = grid(1, f"{LAYERS} layers, forward and backward, in {BUDGET} tensors")
    figure.set_size_inches(7, 4.2)
    for place, begin, until, again in found.spans:
        colour = GRADIENT if place >= LAYERS else AGAIN if again else FIRST
        row = place if place < LAYERS else 2 * LAYERS - 1 - place + 0.42
        panel.broken_barh([(begin - 1, until - begin + 1)], (row + 0.1, 0.38), color=colour, linewidth=0)
        panel.plot(begin - 0.5, row + 0.29, "o" if not again else "D", color="#222222", markersize=3)
    backward = min(begin for place, begin, _, _ in found.spans if place == LAYERS) - 1
    panel.axvline(backward, color="#222222", linestyle="--", linewidth=0.9)
    panel.text(backward + 0.2, -0.15, "backward pass", fontsize=7)
    panel.set_xticks(range(0, found.end + 1, 2))
    panel.set_yticks([row + 0.5 for row in range(LAYERS)], [f"layer {row + 1}" for row in range(LAYERS)])
    panel.set(xlabel="operators, one after the other", xlim=(0, found.end), ylim=(LAYERS, -0.5))
    panel.grid(visible=False, axis="y")
    held = {
        FIRST: "output, since it was first computed",
        AGAIN: "output, computed again",
        GRADIENT: "gradient",
    }
    legend(figure, [panel], extra=[Patch(color=colour, label=label) for colour, label in held.items()])
    save(figure, folder, "how-chain", "svg")


def versions(folder: Path) -> None:
    """A storage, the tensors over it, and its versions with their recipes."""
    figure, (panel,) = grid(1, "")
    figure.set_size_inches(7, 3.5)
    panel.set_axis_off()
    panel.set(xlim=(0, 70), ylim=(0, 35))

    def box(x: float, y: float, text: str, colour: str = "#ffffff", width: float = 14.0) -> None:
        look = {"boxstyle": "round,pad=0.15", "facecolor": colour, "edgecolor": "#444444", "linewidth": 0.8}
        from matplotlib.patches import FancyBboxPatch

        panel.add_patch(FancyBboxPatch((x, y), width, 4, **look))
        panel.text(x + width / 2, y + 2, text, ha="center", va="center", fontsize=7.5)

    def arrow(
        begin: tuple[float, float], end: tuple[float, float], text: str = "", dashed: bool = False
    ) -> None:
        style: dict[str, Any] = {
            "arrowstyle": "-|>",
            "color": "#444444",
            "linewidth": 0.9,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        panel.annotate("", end, begin, arrowprops={**style, "linestyle": "--" if dashed else "-"})
        middle = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
        panel.text(middle[0], middle[1] + 0.5, text, ha="center", va="bottom", fontsize=7, style="italic")

    names = ("y", "y.view(…), a view", "saved by autograd")
    panel.text(1, 33.4, "tensors: the program's, as PyTorch made them", fontsize=7, color="#555555")
    for place, name in enumerate(names):
        box(12 + 19 * place, 28, name, width=15)
        arrow((19.5 + 19 * place, 27.6), (38.5, 24.6))
    box(27, 20, "one storage: evicted, or whole", COLOURS[4], width=23)
    panel.text(
        52, 22, "emptied and refilled\nunder all of them at once", fontsize=7, va="center", color="#555555"
    )
    arrow((38.5, 19.6), (57, 12.6), dashed=True)
    panel.text(52.5, 16.5, "holds its newest version", fontsize=7, color="#555555")
    panel.text(1, 16.5, "versions, and what made them", fontsize=7, color="#555555")
    box(1, 8, "x, w: constants", "#d9d9d9")
    for place, text in enumerate(("version 0", "version 1", "version 2")):
        box(22 + 14 * place + 3 * place, 8, text, width=11)
    arrow((15.4, 10), (21.6, 10), "x @ w")
    arrow((33.4, 10), (38.6, 10), "add_")
    arrow((50.4, 10), (55.6, 10), "relu_")
    panel.text(
        1,
        2.5,
        "To have version 2 again: x @ w, add_ and relu_ are run again, from what cannot be evicted.",
        fontsize=7.5,
    )
    save(figure, folder, "how-versions", "svg")


def times(folder: Path) -> None:
    """Time by part, at several budgets, from the kept runs; relative, since the machine was busy."""
    kept = json.loads((HERE / "runs.json").read_text())["times"]
    peak = max(run["peak_bytes"] for run in kept)
    names = [f"{100 * run['budget_bytes'] / peak:.0f} %" for run in kept]
    figure, (panel,) = grid(1, "Where the time of a transformer's steps goes, inside shares of its peak")
    figure.set_size_inches(7, 3.2)
    left = [0.0] * len(kept)
    for part, label, colour in zip(PARTS, LABELS, SHADES, strict=True):
        shares = [run["seconds"][part] / run["seconds"]["operators"] for run in kept]
        panel.barh(names, shares, left=left, color=colour, label=label, height=0.6)
        left = [so_far + more for so_far, more in zip(left, shares, strict=True)]
    panel.invert_yaxis()
    panel.set(xlabel="time, over that of the program's own operators", ylabel="budget")
    panel.grid(visible=False, axis="y")
    legend(figure, [panel])
    save(figure, folder, "how-time", "svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
