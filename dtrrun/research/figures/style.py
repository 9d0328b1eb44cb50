"""The style of all pictures. Here and in the modules that draw, matplotlib is imported only when needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")
"""Okabe and Ito's colours, which are distinguishable with any kind of colour vision, then gray."""
MARKERS = "osD^vP*X"

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "figure.dpi": 110,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "dtrrun",  # otherwise ids in an SVG are random
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


class MissingMatplotlib(RuntimeError):
    """Raised if a picture is requested and matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("pictures need matplotlib, which is not installed: pip install matplotlib")


def need_matplotlib() -> None:
    """Raise MissingMatplotlib if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingMatplotlib from None


def grid(count: int, title: str) -> tuple[Figure, list[Axes]]:
    """Make a figure with `count` panels. Call it inside `styled()`."""
    from matplotlib.figure import Figure

    columns = min(count, 4 if count > 6 else 3)
    lines = -(-count // columns)
    figure = Figure(figsize=(0.5 + 3.0 * columns, 1.0 + 2.4 * lines), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def styled() -> Any:
    """Return a context with our style, regardless of the user's."""
    import matplotlib

    everything: dict[Any, Any] = {**matplotlib.rcParamsDefault, "backend": "agg"}
    return matplotlib.rc_context(everything | STYLE)


def legend(figure: Figure, axes: Sequence[Axes], extra: Sequence[Any] = ()) -> None:
    """Add one legend for all panels, at the bottom."""
    found: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    handles, labels = [*found.values(), *extra], [*found, *(str(one.get_label()) for one in extra)]
    inches = 0.6 + 0.075 * max(map(len, labels), default=0)
    columns = max(1, min(len(labels), int(figure.get_figwidth() / inches)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def save(figure: Figure, folder: Path, name: str, format: str) -> Path:
    """Write the picture reproducibly, byte for byte. Raises OSError."""
    path = folder / f"{name}.{format}"
    metadata = {"Date": None} if format == "svg" else {"Software": None}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        figure.savefig(file, format=format, metadata=metadata)
    return path
