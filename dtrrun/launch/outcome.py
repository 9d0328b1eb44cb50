"""The exit status of a run, and the message if the budget never took effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtrrun.launch.errors import BY_SIGNAL, FAILED, MISMATCH, VIOLATION
from dtrrun.telemetry.record import Snapshot

NESTED = "nested"
"""The mark left by another dtrrun that the target ran."""
REPLACED, STOPPED = "replaced", "stopped"
"""Statuses of processes: image replaced by `exec`; daemon stopped by its parent (as in a pool)."""


@dataclass(frozen=True)
class Marks:
    """Marks that the hook in the target's processes left next to the records."""

    python: bool = False
    """Whether any Python process loaded the hook."""
    starts: tuple[tuple[int, float], ...] = ()
    """For each process that did: its id, and the start of its interpreter, in seconds since the epoch."""
    daemons: frozenset[int] = frozenset()
    """Ids of daemonic children of `multiprocessing`."""
    nested: bool = False
    """Whether the target ran another dtrrun."""
    old_python: bool = False
    """Whether any Python process was too old."""
    without_torch: tuple[str, ...] = ()
    """Interpreters that found no torch."""
    importing: bool = False
    """Whether a process ended while it imported torch, or dtrrun was starting in it."""
    failures: tuple[str, ...] = ()
    """Why processes could not be put under the budget; each was ended."""


def read_marks(folder: Path) -> Marks:
    """Read the marks in the folder of records."""
    without = folder / "no-torch"
    return Marks(
        python=(folder / "python").exists(),
        starts=tuple((int(pid), float(ns) / 1e9) for pid, ns in _rows(folder / "python", 2)),
        daemons=_pids(folder / "daemons"),
        nested=(folder / NESTED).exists(),
        old_python=(folder / "old-python").exists(),
        without_torch=tuple(dict.fromkeys(without.read_text().splitlines())) if without.exists() else (),
        importing=bool(_pids(folder / "importing") - _pids(folder / "imported")),
        failures=tuple(path.read_text() for path in sorted(folder.glob("failed-*"))),
    )


def _pids(path: Path) -> frozenset[int]:
    return frozenset(int(pid) for (pid,) in _rows(path, 1))


def _rows(path: Path, columns: int) -> list[list[str]]:
    """Return the complete rows of numbers in a file of marks."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [row for row in rows if len(row) == columns and all(word.isdecimal() for word in row)]


def explained(snapshots: Sequence[Snapshot], marks: Marks) -> list[Snapshot]:
    """Return the snapshots, with a status for processes that ended without one but were not killed."""
    return [snapshot if snapshot.ended else _explained(snapshot, marks) for snapshot in snapshots]


def _explained(snapshot: Snapshot, marks: Marks) -> Snapshot:
    began = snapshot.meta.get("start")
    # A process loads the hook again if `exec` replaces its image.
    if isinstance(began, (int, float)) and any(
        pid == snapshot.pid and start > began for pid, start in marks.starts
    ):
        return replace(snapshot, ended=True, status=REPLACED)
    if not snapshot.alive and snapshot.pid in marks.daemons:
        return replace(snapshot, ended=True, status=STOPPED)
    return snapshot


@dataclass(frozen=True)
class Outcome:
    """How the run ended: our exit status, the signal to end ourselves with, and messages for the user."""

    exit_status: int
    signal: int | None = None
    error: str | None = None
    note: str | None = None
    absent: str | None = None
    """Why no process of the target ran under dtrrun; part of `error` or `note`."""


def judge(
    returncode: int, snapshots: Sequence[Snapshot], marks: Marks, stopped: str | None = None
) -> Outcome:
    """Return the outcome for a target that ended with `returncode` (negative: by that signal).

    The target's own status is passed on, with these exceptions: it is 4 if we stopped the run because of the
    driver's figures (`stopped`); otherwise 125 if a process could not be put under the budget. A success
    becomes 125 if no process ran under the budget, or 3 if a rematerialized storage differed.
    """
    if stopped is not None:
        return Outcome(VIOLATION, error=f"stopped: {stopped}")
    if marks.failures:
        count = len(marks.failures)
        processes = "a process" if count == 1 else f"{count} processes"
        return Outcome(FAILED, error=f"{processes} could not be put under the budget: {marks.failures[0]}")
    absent = None if snapshots else _why_absent(marks)
    if absent and marks.nested:
        return Outcome(
            BY_SIGNAL - returncode if returncode < 0 else returncode,
            signal=-returncode if returncode < 0 else None,
            note="the target ran dtrrun itself: its processes are in that run's figures, not in these",
        )
    if returncode < 0:
        began = marks.python or marks.old_python or marks.without_torch  # else it may have begun later
        note = absent if began else None
        return Outcome(BY_SIGNAL - returncode, signal=-returncode, note=note, absent=absent)
    if returncode > 0:
        return Outcome(returncode, note=absent, absent=absent)
    if absent:
        return Outcome(FAILED, error=f"no process ran under dtrrun: {absent}", absent=absent)
    if any(snapshot.counters.get("verify_mismatches") for snapshot in snapshots):
        return Outcome(
            MISMATCH, error="rematerialized storages differ from what was evicted, so results may be wrong"
        )
    return Outcome(0)


def _why_absent(marks: Marks) -> str:
    if marks.without_torch:
        python = marks.without_torch[0]
        return f"torch is not installed for {python}: install it there, or name another Python with --python"
    if marks.importing:
        return "the program ended while it imported torch, before dtrrun had started in it"
    if marks.python:
        return "the program never imported torch"
    if marks.old_python:
        return "the target's Python is too old; dtrrun needs 3.11 or later"
    return (
        "the target started no Python, or only one that ran with -I, -E or -S or without dtrrun's PYTHONPATH"
    )
