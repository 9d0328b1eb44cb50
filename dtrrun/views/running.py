"""The runs under way: `dtrrun top`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import format_size
from dtrrun.telemetry.run import Run
from dtrrun.views.figures import breakdown, slowdown, total
from dtrrun.views.panels import columns_table
from dtrrun.views.picture import picture
from dtrrun.views.rates import Rates
from dtrrun.views.text import duration, plain, words_of

COLUMNS = ("pid", "device", "budget", "resident", "peak", "steps", "slowdown", "time", "target")


def runs_table(runs: Sequence[Run]) -> RenderableType:
    """One line a run."""
    if not runs:
        return Text("no run of dtrrun is under way")
    table = columns_table(*COLUMNS)
    last = table.columns[-1]  # where there is little room, the target's name is cut
    last.justify, last.no_wrap = "left", False
    for run in runs:
        counters = total(run.snapshots)
        budget = max(snapshot.counters["budget_bytes"] for snapshot in run.snapshots)
        found = slowdown(breakdown(counters))
        table.add_row(
            str(run.pid),
            Text(plain(run.snapshots[0].meta.get("device") or "", 12)),
            format_size(budget) if budget > 0 else "–",
            format_size(counters["resident_bytes"]),
            format_size(counters["peak_bytes"]),
            f"{counters['steps']:,}",
            "–" if found is None else f"{found:.2f}",
            duration(time.time() - run.start),
            Text(target(run), no_wrap=True, overflow="ellipsis"),
        )
    return table


def settings_of(run: Run) -> RuntimeSettings:
    """Those of its first training process."""
    said = run.snapshots[0].meta.get("settings")
    return RuntimeSettings.from_values(said if isinstance(said, dict) else {})


def target(run: Run) -> str:
    """The words of the target."""
    return words_of(run.command, 60)


def run_picture(run: Run, rates: Rates, stream: TextIO, columns: int, height: int) -> RenderableType:
    """The live table of one run, as the run itself would show it."""
    rates.add(run.snapshots)
    lines = picture(run.snapshots, settings_of(run), rates, stream, columns, 2 * height)
    return Text.from_ansi("\n".join([f"{run.pid}  {target(run)}", *lines]))
