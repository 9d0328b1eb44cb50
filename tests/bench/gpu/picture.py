"""The results as a picture: time over memory, one panel per model, the prototype's figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtrrun.research.figures.style import COLOURS, grid, legend, need_matplotlib, save, styled
from tests.bench.gpu.cases import BY_NAME


def draw(results: list[dict[str, Any]], title: str, path: Path) -> None:
    """Write the picture of the parts with times. Raises MissingMatplotlib, OSError."""
    need_matplotlib()
    shown = [result for result in results if any(run.ok for run in result["plain"])]
    with styled():
        figure, axes = grid(len(shown), title)
        for result, panel in zip(shown, axes, strict=True):
            _panel(result, panel)
        legend(figure, axes)
        save(figure, path.parent, path.stem, path.suffix.removeprefix("."))


def _panel(result: dict[str, Any], panel: Any) -> None:
    case = BY_NAME[result["case"]]
    plain = [run for run in result["plain"] if run.ok]
    ms, peak = sum(run.ms for run in plain) / len(plain), result["peak"]
    if case.prototype is not None:
        theirs = sorted(zip(case.prototype.shares, case.prototype.ratios, strict=True))
        panel.plot(*zip(*theirs, strict=True), color=COLOURS[1], marker="s", label="prototype, Titan V")
    runs = [one["run"] for one in result["shares"] if one["run"].ok]
    points = sorted((run.allocated / peak, run.ms / ms) for run in runs)
    if points:
        panel.plot(*zip(*points, strict=True), color=COLOURS[0], marker="o", label="dtrrun")
    for name, marker, label in (
        ("checkpointed", "^", "checkpointed by block"),
        ("as_checkpointed", "v", "dtrrun in the same peak"),
    ):
        run = result.get(name)
        if run is not None and run.ok:
            style = {"marker": marker, "linestyle": "none", "markersize": 6, "color": COLOURS[2]}
            fill = {} if name == "checkpointed" else {"markerfacecolor": "none"}
            panel.plot([run.allocated / peak], [run.ms / ms], label=label, **style, **fill)
    panel.axhline(1, color="#7f7f7f", linewidth=0.8)
    panel.set(title=case.title, xlim=(0, 1.05), xlabel="allocated peak / plain", ylabel="time / plain")
