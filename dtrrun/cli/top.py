"""The verb `top`: shows the current runs from another terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from dtrrun.cli.messages import say, to_stdout
from dtrrun.cli.report_file import report_writer
from dtrrun.launch.running import find
from dtrrun.settings import option
from dtrrun.telemetry.run import Run
from dtrrun.views.panels import console_for, print_to
from dtrrun.views.rates import Rates
from dtrrun.views.report import build_report
from dtrrun.views.running import run_picture, runs_table, settings_of

SCHEMA = "dtrrun.top/1"
EVERY = 1.0
"""Seconds between updates."""

USAGE = "top [OPTIONS]"
EPILOG = """
[bold]Examples[/bold]

dtrrun top

dtrrun top 4711

dtrrun top --once --json -

[bold]Exit status[/bold]: 0; 1, no run has that PID; 2, usage error. Ctrl-C ends it.
"""


@dataclass(frozen=True)
class Top:
    """The options of `dtrrun top`."""

    pid: int | None = option("The PID of a run, or of a training process in it.", word="PID", argument=True)
    once: bool = option(
        "Print the table once and exit; the default where there is no terminal.", default=False, one_way=True
    )
    json: str | None = option("Write the figures of all runs once, as JSON; - is standard output.")


def top(given: Top, _: Sequence[str]) -> int:
    """Show your runs of dtrrun on this machine, or the live table of one of them.

    It reads the small file in which each training process keeps its figures. So it also works for runs that
    were started without a live table, and costs them nothing. Budget, tensors and peak are of one process of
    the run, the largest.
    """
    pid = given.pid
    if given.json is not None:
        with report_writer(given.json) as write:
            write({"schema": SCHEMA, "runs": [_report(run) for run in _wanted(pid)]})
        return 0
    console = console_for(sys.stdout, None)
    rates = Rates()

    def look() -> RenderableType | None:
        runs = _wanted(pid)
        if pid is None:
            return runs_table(runs, console.width)
        return run_picture(runs[0], rates, sys.stdout, console.width, console.height) if runs else None

    first = look()
    if first is None:
        say(f"error: there is no dtrrun run with PID {pid}")
        return 1
    if given.once or not console.is_terminal:
        with to_stdout():
            print_to(sys.stdout, console, first)
        return 0
    _watch(console, look, first)
    return 0


def _watch(console: Console, look: Callable[[], RenderableType | None], first: RenderableType) -> None:
    try:
        with Live(first, console=console, auto_refresh=False, transient=True) as live:
            while (seen := look()) is not None:
                live.update(seen, refresh=True)
                time.sleep(EVERY)
        say("the run has ended")
    except KeyboardInterrupt:
        pass


def _wanted(pid: int | None) -> list[Run]:
    return [
        run
        for run in find()
        if pid is None or pid == run.pid or any(snapshot.pid == pid for snapshot in run.snapshots)
    ]


def _report(run: Run) -> dict[str, Any]:
    report = build_report(run.snapshots, settings_of(run), 0, run.command, time.time() - run.start)
    kept = {name: value for name, value in report.items() if name not in ("schema", "exit_code")}
    return {"pid": run.pid, "start": run.start, **kept}
