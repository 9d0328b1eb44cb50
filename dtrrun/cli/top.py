"""The verb `top`: the runs that are under way, looked at from another terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from dtrrun.cli import values
from dtrrun.cli.messages import say, to_stdout
from dtrrun.cli.parameters import read
from dtrrun.cli.report_file import report_writer
from dtrrun.launch.running import find
from dtrrun.telemetry.run import Run
from dtrrun.views.panels import console_for, print_to
from dtrrun.views.rates import Rates
from dtrrun.views.report import build_report
from dtrrun.views.running import run_picture, runs_table, settings_of

SCHEMA = "dtrrun.top/1"
EVERY = 1.0
"""Seconds between two looks."""

EPILOG = """
[bold]Examples[/bold]

dtrrun top

dtrrun top 4711

dtrrun top --once --json -

[bold]Exit status[/bold]: 0; 1, no run has that PID; 2, wrong usage. Ctrl-C ends it.
"""
COMMAND: dict[str, Any] = {
    "options_metavar": "top [OPTIONS]",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def top(
    pid: Annotated[
        str | None, typer.Argument(metavar="PID", help="The PID of a run, or of a training process in it.")
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once", metavar="", help="Print the table once, as is done where there is no terminal."
        ),
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Write the figures of all runs once, as JSON; - is standard output."
        ),
    ] = None,
) -> int:
    """Show your runs of dtrrun on this machine, or the live table of one of them.

    It reads the small file in which each training process keeps its figures. So it also works for runs that
    were started without a live table, and costs them nothing. Budget, resident and peak are of one process of
    the run, the largest.
    """
    wanted = None if pid is None else read("PID", values.whole_number(least=1), pid)
    if json is not None:
        with report_writer(json) as write:
            write({"schema": SCHEMA, "runs": [_report(run) for run in _wanted(wanted)]})
        return 0
    console = console_for(sys.stdout, None)
    rates = Rates()

    def look() -> RenderableType | None:
        runs = _wanted(wanted)
        if pid is None:
            return runs_table(runs)
        return run_picture(runs[0], rates, sys.stdout, console.width, console.height) if runs else None

    first = look()
    if first is None:
        say(f"error: no run of dtrrun with the PID {pid} is under way")
        return 1
    if once or not console.is_terminal:
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
