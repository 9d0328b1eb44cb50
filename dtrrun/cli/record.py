"""The verb `record`: the operators of a real step, for the simulator."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtrrun import values
from dtrrun.cli.command import of_run
from dtrrun.cli.messages import say
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import Options, collect
from dtrrun.cli.supervise import supervise
from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.launch.interpreter import choose
from dtrrun.launch.target import resolve
from dtrrun.settings import option
from dtrrun.simulator.schedule import read_schedule
from dtrrun.sizes import format_size
from dtrrun.telemetry.record import Snapshot

USAGE = "record -o PATH [OPTIONS] [--] TARGET [ARGS]..."
EPILOG = """
[bold]Examples[/bold]

dtrrun record -o step.log train.py --epochs 3

dtrrun record -o steps.log.gz --step 1-3 --cost model -m mypackage.train

[bold]Exit status[/bold]: the target's own, or 125 if the step was not recorded; 2, usage error.
"""


@dataclass(frozen=True)
class Record:
    """The options of `dtrrun record`."""

    output: str | None = option("Write the log here; a PATH that ends in .gz is compressed.", short="-o")
    step: str = option(
        "The step or steps to record, counted from 1 by calls of an optimizer's step(). The first one "
        "includes all that comes before it.",
        default="2",
        read=values.anything,
        word="N|N-M",
    )
    go_on: bool = option("Let the program run on after that step instead of ending it.", default=False)
    of_run: Mapping[str, Any] = of_run("cost", "device", "quiet", "python", panel="Options")


def record(given: Record, target: Sequence[str]) -> int:
    """Record the operators that TARGET, an unmodified PyTorch program, runs in a step.

    The log has every operator in the paper's format (App. C.6), with sizes, costs, aliases, mutations and
    releases, and what the simulator needs to predict dtrrun itself. The program runs without a budget. If it
    has several processes, that of rank 0 is recorded.
    """
    output, step = given.output, given.step
    if output is None:
        raise LaunchError("record needs -o PATH, the file to write the log to")
    first, last = read_steps(step)
    options = inside_another(collect(given.of_run), limits=False)
    path = Path(output).absolute()
    part = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise LaunchError(f"-o: {path.parent} is not a writable folder")
    if path.exists() and not path.is_file():
        raise LaunchError(f"-o: {output} is not a regular file")
    settings = replace(
        options.settings,
        budget_bytes=None,
        verify=False,
        max_slowdown=None,
        max_steps=None if given.go_on else last,
        log=str(part),
        log_first=first,
        log_last=last,
    )
    options = replace(options, settings=settings)
    command = resolve(target, lambda: choose(options.python))
    return supervise(options, command, lambda status, left: _ended(part, path, options, status, step, left))


def read_steps(text: str) -> tuple[int, int]:
    """Parse `2` or `1-3`. Raises LaunchError."""
    first, dash, last = text.partition("-")
    try:
        found = int(first), int(last if dash else first)
    except ValueError:
        raise LaunchError(f"--step: {text!r} is neither a number nor a range such as 1-3") from None
    if not 1 <= found[0] <= found[1]:
        raise LaunchError(f"--step: {text!r} is not a range of steps, which are counted from 1")
    return found


def _ended(part: Path, path: Path, options: Options, status: int, step: str, left: Sequence[Snapshot]) -> int:
    """Rename the complete log, or report why there is none. Returns the exit status."""
    try:
        return _moved(part, path, options, status, step, left)
    finally:
        for unfinished in (part, part.with_name(f"{part.name}.part")):
            with suppress(OSError):
                unfinished.unlink()


def _moved(part: Path, path: Path, options: Options, status: int, step: str, left: Sequence[Snapshot]) -> int:
    if not part.exists():
        if not left and status == FAILED:
            return status  # why nothing ran under dtrrun has been reported
        why = f"the program ended before the end of step {step}"
        if not any(one.counters["steps"] for one in left):
            why = "the program made no optimizer step"
        say(f"error: nothing was recorded: {_why_unwritten(path, left) or why}")
        return status or FAILED
    try:
        os.replace(part, path)
    except OSError as error:
        say(f"error: nothing was recorded: {path} cannot be written: {error.strerror}")
        return status or FAILED
    if not options.settings.quiet:
        schedule = read_schedule(path)
        count, peak = len(schedule.operators), format_size(schedule.peak_bytes)
        say(f"wrote step {step} to {path}: {count:,} operators and constants, peak {peak}")
    return status


def _why_unwritten(path: Path, left: Sequence[Snapshot]) -> str | None:
    for one in left:
        if why := one.tables.get("log_error"):
            return f"{path} cannot be written: {why}"
    return None
