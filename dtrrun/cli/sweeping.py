"""The work of `dtrrun simulate` between options and tables: reading, replaying, showing progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dtrrun.cli.messages import if_someone_reads, say, to_stdout
from dtrrun.cli.report_file import write_each
from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.simulator import sweep
from dtrrun.simulator.log import LogError
from dtrrun.views.panels import console_for

INTERRUPTED = 130

Result = dict[str, Any]

C = TypeVar("C")
R = TypeVar("R")


def cells_of(
    logs: Sequence[sweep.Facts],
    budgets: Sequence[sweep.Budget],
    parts: Sequence[tuple[Sequence[str], Sequence[str], Sequence[str], bool]],
    options: dict[str, Any],
) -> list[sweep.Cell]:
    """Return the cells log by log; those common to several parts occur once."""
    found: dict[sweep.Cell, sweep.Cell] = {}
    for log in logs:
        for heuristics, deallocations, searches, count in parts:
            for cell in sweep.cells(
                [log], heuristics, budgets, deallocations, searches, count=count, **options
            ):
                found.setdefault(replace(cell, count=False), cell)
    return list(found.values())


def read_logs(words: Sequence[str]) -> list[sweep.Facts]:
    """Return the figures of the given logs. Raises LaunchError."""
    paths: list[str] = []
    for word in words:
        if Path(word).is_dir():
            found = sorted(str(path) for end in ("*.log", "*.log.gz") for path in Path(word).glob(end))
            if not found:
                raise LaunchError(f"{word}: there is no *.log or *.log.gz in this folder")
            paths += found
        else:
            if Path(word).exists() and not Path(word).is_file():
                raise LaunchError(f"{word}: not a regular file, and a log is read several times")
            paths.append(word)
    try:
        return sweep.read_facts(list(dict.fromkeys(paths)))
    except LogError as error:
        raise LaunchError(str(error)) from None
    except OSError as error:
        raise LaunchError(f"{error.filename}: {error.strerror}") from None


def run(one: Callable[[C], R], cells: Sequence[C], jobs: int, progress: str | None) -> tuple[list[R], bool]:
    """Return the results of `one` for the finished cells, in order, and whether these are all.

    progress: description for a terminal. Raises LaunchError.
    """
    rows: dict[int, R] = {}
    console = console_for(sys.stderr, None)
    columns = (TextColumn(progress or ""), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not (progress and console.is_terminal))
    task = bar.add_task("", total=len(cells))
    done = False
    try:
        with bar, closing(sweep.run_all(one, cells, jobs)) as completed:
            for index, row in completed:
                rows[index] = row
                bar.advance(task)
        done = True
    except KeyboardInterrupt:
        pass
    except (ValueError, ImportError) as error:  # usually a user's heuristic, or a missing extra
        raise LaunchError(str(error)) from None
    return [rows[index] for index in sorted(rows)], done


def import_from_here(heuristics: Iterable[str]) -> None:
    """Make the user's functions importable from the current folder, as `python` does."""
    if any(":" in name for name in heuristics):
        sys.path.insert(0, "")


def print_and_write(
    result: Result,
    show: Callable[[Result, TextIO], None],
    json: str | None,
    quiet: bool,
    write: Callable[[Result], None],
    more: Mapping[str, Callable[[], object]] | None = None,
) -> list[str]:
    """Print the tables, on stderr if the rows go to standard output; write the rows, and what else is given.

    Returns what could not be written, as `write_each` does.
    """

    def tables() -> None:
        if quiet:
            return
        if json == "-":
            with if_someone_reads():
                show(result, sys.stderr)
        else:
            with to_stdout():
                show(result, sys.stdout)

    return write_each({"standard output": tables, "--json": lambda: write(result), **(more or {})})


def ended(
    result: Result,
    done: bool,
    unwritten: Sequence[str],
    count: str,
    draw: Callable[[Result, Path, str], Sequence[Path]],
    folder: Path | None,
    format: str,
    quiet: bool,
) -> int:
    """Draw the pictures, if requested and everything was done. Returns the exit status. Raises LaunchError.

    unwritten: tables and rows that could not be written. count: how many were done, out of how many.
    """
    if not done:
        say(f"interrupted: {count} were done")
        return INTERRUPTED
    status = FAILED if unwritten else 0
    if folder is None:
        return status
    try:
        paths = draw(result, folder, format)
    except OSError as error:
        raise LaunchError(f"--figures: {error.filename}: {error.strerror}", FAILED) from None
    for path in paths:
        say(f"wrote {path}") if not quiet else None
    return status


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
