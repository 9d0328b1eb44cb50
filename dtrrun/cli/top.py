"""The verb `top`: shows the current runs from another terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dtrrun.cli.messages import say, to_stdout
from dtrrun.cli.report_file import report_writer
from dtrrun.launch.keys import keys
from dtrrun.launch.running import find
from dtrrun.settings import option
from dtrrun.telemetry.run import Run
from dtrrun.views.panels import console_for, print_to
from dtrrun.views.rates import Rates
from dtrrun.views.report import build_report
from dtrrun.views.running import run_picture, runs_table, settings_of, target

SCHEMA = "dtrrun.top/1"
EVERY = 1.0
"""Seconds between updates."""

USAGE = "top [OPTIONS]"
EPILOG = """
[bold]Examples[/bold]

dtrrun top

dtrrun top 4711

dtrrun top --once --json -

[bold]Keys[/bold]: e ends a run, once y confirms it; q or Ctrl-C leaves.

[bold]Exit status[/bold]: 0; 1, no run has that PID; 2, usage error.
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

    def picture(runs: list[Run], height: int) -> RenderableType:
        if pid is None:
            return runs_table(runs, console.width)
        return run_picture(runs[0], rates, sys.stdout, console.width, height)

    runs = _wanted(pid)
    if pid is not None and not runs:
        say(f"error: there is no dtrrun run with PID {pid}")
        return 1
    if given.once or not console.is_terminal:
        with to_stdout():
            print_to(sys.stdout, console, picture(runs, console.height))
        return 0
    _watch(console, pid, picture)
    return 0


def _watch(console: Console, pid: int | None, picture: Callable[[list[Run], int], RenderableType]) -> None:
    ending = Ending()
    with suppress(KeyboardInterrupt), keys() as pressed:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while (runs := _wanted(pid)) or pid is None:
                told = [Text(ending.line, style="dim", no_wrap=True, overflow="ellipsis")] if pressed else []
                live.update(Group(picture(runs, console.height - len(told)), *told), refresh=True)
                if not ending.press(pressed.pressed(EVERY), runs):
                    return
        say("the run has ended")


class Ending:
    """Ends a run by keys. `line` says which ones there are now."""

    KEYS = "e: end a run   q: leave"

    def __init__(self, send: Callable[[int, int], None] = os.kill) -> None:
        self._send = send
        self._choice: list[Run] = []  # one: it is to be confirmed; more: it is to be chosen
        self.line = self.KEYS

    def press(self, key: str, runs: Sequence[Run]) -> bool:
        """React to a key, if any. runs: those that are shown. Returns whether to go on."""
        choice, self._choice = self._choice, []
        if not key:
            there = {run.pid for run in runs}
            self._choice = [run for run in choice if run.pid in there]
            if choice and not self._choice:
                self.line = self.KEYS
        elif len(choice) == 1 and key == "y":
            self._end(choice[0])
        elif choice and key.isdigit() and 0 < int(key) <= len(choice):
            self._ask([choice[int(key) - 1]])
        elif choice:
            self.line = self.KEYS
        elif key == "e" and runs:
            self._ask(runs[:9])
        return key != "q" or bool(choice)

    def _ask(self, choice: Sequence[Run]) -> None:
        self._choice = list(choice)
        names = [f"{run.pid} {target(run)}" for run in choice]
        if len(choice) == 1:
            self.line = f"end {names[0]}? y: yes, any other key: no"
        else:
            self.line = f"end which? {'   '.join(f'{place}: {name}' for place, name in enumerate(names, 1))}"

    def _end(self, run: Run) -> None:
        """Ask the run's command to end: it passes the signal on, and writes its report."""
        try:
            self._send(run.pid, signal.SIGTERM)
        except OSError as error:
            self.line = f"{run.pid} cannot be ended: {error.strerror}   {self.KEYS}"
        else:
            self.line = f"{run.pid} is asked to end   {self.KEYS}"


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
