"""The running instances shown by `dtrrun top`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import format_size
from dtrrun.telemetry.run import Run
from dtrrun.views.figures import run_slowdown, step_slowdown, total
from dtrrun.views.panels import narrowed, rows_table
from dtrrun.views.picture import picture, running
from dtrrun.views.rates import Rates
from dtrrun.views.text import duration, plain, times_as_long

COLUMNS = ("pid", "procs", "device", "budget", "tensors", "peak", "steps", "slowdown", "time", "target")
SCRIPTS = (".py", ".sh")
LEFT_OUT = ("device", "tensors", "time", "steps", "procs", "budget", "slowdown")
"""Columns that do not fit are omitted in this order."""
TARGET = 16, 26
"""Minimum width of the target's name, if it is that long; and if its script's name is."""


def runs_table(runs: Sequence[Run], width: int) -> RenderableType:
    """Return one line per run.

    Budget, tensors and peak are per process, like the budget itself: the largest among the live ones. The
    slowdown is the slowest process's, over its steps; of the whole run if it makes none.
    """
    if not runs:
        return Text("no dtrrun run is in progress")
    rows = [dict(zip(COLUMNS, _cells(run), strict=True)) for run in runs]
    scripts = [len(target(run).partition(" ")[0]) for run in runs]
    least = min(max(TARGET[0], *scripts), TARGET[1])
    short = [row | {"target": row["target"][:least]} for row in rows]
    needed = narrowed(width, short, COLUMNS, LEFT_OUT)
    table = rows_table(rows, [str(column.header) for column in needed.columns])
    last = table.columns[-1]  # if there is little room, the target's name is truncated
    last.justify, last.no_wrap = "left", False
    return table


def _cells(run: Run) -> tuple[str | Text, ...]:
    shown = running(run.snapshots)
    most = {
        name: max(snapshot.counters[name] for snapshot in shown)
        for name in ("budget_bytes", "resident_bytes", "peak_bytes", "steps")
    }
    found = step_slowdown(shown)
    if found is None:
        found = run_slowdown(total(shown))
    return (
        str(run.pid),
        processes(run),
        Text(plain(shown[0].meta.get("device") or "", 12)),
        format_size(most["budget_bytes"]) if most["budget_bytes"] > 0 else "–",
        format_size(most["resident_bytes"]),
        format_size(most["peak_bytes"]),
        f"{most['steps']:,}",
        times_as_long(found),
        duration(time.time() - run.start),
        Text(target(run), no_wrap=True, overflow="ellipsis"),
    )


def processes(run: Run) -> Text:
    """Return how many are training now, and how many were killed or lacked room."""
    living = sum(one.alive and not one.ended for one in run.snapshots)
    killed = sum(not one.alive and not one.ended for one in run.snapshots)
    too_small = sum(one.values("error") is not None for one in run.snapshots)
    trouble = [f"{killed} killed"] if killed else []
    trouble += [f"{too_small} without room"] if too_small else []
    return Text.assemble(str(living), (f", {', '.join(trouble)}" if trouble else "", "red"))


def settings_of(run: Run) -> RuntimeSettings:
    """Return the settings of the run's first training process."""
    said = run.snapshots[0].meta.get("settings")
    return RuntimeSettings.from_values(said if isinstance(said, dict) else {})


def target(run: Run) -> str:
    """Return the words of the target, without the folders of its scripts and commands: the script first.

    `train.py --lr 1 (torchrun --nproc-per-node 2)`, for a script that another command starts.
    """
    words = [
        os.path.basename(word) if not place or word.endswith(SCRIPTS) else word
        for place, word in enumerate(run.command)
    ]
    python = os.path.basename(words[0]).startswith("python") if words else False
    if python and words[1:2] == ["-m"]:
        return plain(" ".join(words[2:]), 60)
    found = next((place for place, word in enumerate(words) if word.endswith(SCRIPTS)), 0)
    before = [] if python else words[:found]
    return plain(" ".join([*words[found:], *([f"({' '.join(before)})"] if before else [])]), 60)


def run_picture(run: Run, rates: Rates, stream: TextIO, columns: int, height: int) -> RenderableType:
    """Return the live table of one run, as the run itself would show it."""
    rates.add(run.snapshots)
    lines = picture(run.snapshots, settings_of(run), rates, stream, columns, 2 * height)
    return Text.from_ansi("\n".join([f"{run.pid}  {target(run)}", *lines]))
