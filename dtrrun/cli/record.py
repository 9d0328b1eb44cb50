"""The verb `record`: the operators of a real step, for the simulator."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dtrrun.cli.messages import say
from dtrrun.cli.options import Options, collect
from dtrrun.cli.supervise import supervise
from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.launch.interpreter import choose
from dtrrun.launch.target import resolve
from dtrrun.simulator.schedule import read_schedule
from dtrrun.sizes import format_size

EPILOG = """
[bold]Examples[/bold]

dtrrun record -o step.log train.py --epochs 3

dtrrun record -o steps.log.gz --step 1-3 --cost model -m mypackage.train

[bold]Exit status[/bold]: the target's own; 125 where the step was not recorded.
"""
COMMAND: dict[str, Any] = {
    "options_metavar": "-o PATH [OPTIONS] [--] TARGET [ARGS]...",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def record(
    ctx: typer.Context,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="PATH", help="The log; compressed where it ends in .gz."),
    ] = None,
    step: Annotated[
        str,
        typer.Option(
            metavar="N|N-M",
            help="Which step, or steps, counted from 1 by calls of an optimizer's step(). The first has all "
            "that comes before it, too.",
        ),
    ] = "2",
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="measured|model", help="An operator's cost: its time (default), or a fixed model."
        ),
    ] = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "--go-on/--no-go-on", metavar="", help="Let the program run on after that step; else it is ended."
        ),
    ] = False,
    quiet: Annotated[
        bool | None, typer.Option("--quiet/--no-quiet", metavar="", help="Print nothing but errors.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The interpreter for a script, -m or -c.")
    ] = None,
) -> int:
    """Write down what TARGET, a PyTorch program that needs no change, does in a step.

    Every operator, in the paper's format (App. C.6): sizes, costs, aliases, mutations and releases, and what
    the simulator needs to predict dtrrun itself. The program runs without a budget. Where it has several
    processes, that of rank 0 is recorded.
    """
    if output is None:
        raise LaunchError("record: -o PATH says where the log goes")
    first, last = read_steps(step)
    options = collect({"cost": cost, "quiet": quiet, "python": python})
    path = Path(output).absolute()
    part = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    if not os.access(path.parent, os.W_OK):
        raise LaunchError(f"-o: {path.parent} is no folder that can be written to")
    settings = replace(
        options.settings,
        budget_bytes=None,
        verify=False,
        max_slowdown=None,
        max_steps=None if go_on else last,
        log=str(part),
        log_first=first,
        log_last=last,
    )
    options = replace(options, settings=settings)
    try:
        status = supervise(options, resolve(ctx.obj, lambda: choose(options.python)))
        return _ended(part, path, options, status, step)
    finally:
        for left in (part, part.with_name(f"{part.name}.part")):
            with suppress(FileNotFoundError):
                left.unlink()


def read_steps(text: str) -> tuple[int, int]:
    """`2` or `1-3`. Raises LaunchError."""
    first, dash, last = text.partition("-")
    try:
        found = int(first), int(last if dash else first)
    except ValueError:
        raise LaunchError(f"--step: {text!r} is neither a number nor a range such as 1-3") from None
    if not 1 <= found[0] <= found[1]:
        raise LaunchError(f"--step: {text!r} is no range of steps, which are counted from 1")
    return found


def _ended(part: Path, path: Path, options: Options, status: int, step: str) -> int:
    if not part.exists():
        say(f"error: nothing was recorded: the program ended before the end of step {step}")
        return status or FAILED
    os.replace(part, path)
    if not options.quiet:
        schedule = read_schedule(path)
        count, peak = len(schedule.operators), format_size(schedule.peak_bytes)
        say(f"step {step} is in {path}: {count:,} operators and constants, peak {peak}")
    return status
