"""The exit status of a run, and what to say when the budget never came into play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrrun.launch.errors import BY_SIGNAL, FAILED, MISMATCH, VIOLATION
from dtrrun.telemetry.record import Snapshot


@dataclass(frozen=True)
class Marks:
    """What the hook in the target's processes left for us beside the records."""

    python: bool = False
    """Some Python process loaded the hook."""
    old_python: bool = False
    """Some Python process was too old for it."""
    without_torch: tuple[str, ...] = ()
    """Interpreters that looked for torch and found none."""
    failures: tuple[str, ...] = ()
    """Why processes could not be put under the budget; each was ended."""


def read_marks(folder: Path) -> Marks:
    """The marks in the folder of records."""
    without = folder / "no-torch"
    return Marks(
        python=(folder / "python").exists(),
        old_python=(folder / "old-python").exists(),
        without_torch=tuple(dict.fromkeys(without.read_text().splitlines())) if without.exists() else (),
        failures=tuple(path.read_text() for path in sorted(folder.glob("failed-*"))),
    )


@dataclass(frozen=True)
class Outcome:
    """How the run ended: our exit status, the signal to die of, and what to tell the user."""

    exit_status: int
    signal: int | None = None
    error: str | None = None
    note: str | None = None


def judge(
    returncode: int, snapshots: Sequence[Snapshot], marks: Marks, stopped: str | None = None
) -> Outcome:
    """The outcome for a target that ended with `returncode` (negative: by that signal).

    The target's own status passes, except that a success is not one if no process ran under the budget (125)
    or a rematerialized storage differed (3), and nothing is right if a process could not be put under it
    (125). A run that we stopped for what the driver showed, `stopped`, ended for that reason, however the
    target took it (4).
    """
    if stopped is not None:
        return Outcome(VIOLATION, error=f"stopped: {stopped}")
    if marks.failures:
        count = len(marks.failures)
        processes = "a process" if count == 1 else f"{count} processes"
        return Outcome(FAILED, error=f"{processes} could not be put under the budget: {marks.failures[0]}")
    absent = None if snapshots else _why_absent(marks)
    if returncode < 0:
        return Outcome(BY_SIGNAL - returncode, signal=-returncode, note=absent)
    if returncode > 0:
        return Outcome(returncode, note=absent)
    if absent:
        return Outcome(FAILED, error=f"nothing ran under the budget: {absent}")
    if any(snapshot.counters.get("verify_mismatches") for snapshot in snapshots):
        return Outcome(MISMATCH, error="rematerialized storages differ from what was evicted")
    return Outcome(0)


def _why_absent(marks: Marks) -> str:
    if marks.without_torch:
        return f"torch is not installed for {marks.without_torch[0]} (--python names another interpreter)"
    if marks.python:
        return "the target's Python never imported torch"
    if marks.old_python:
        return "the target's Python is older than 3.10"
    return "the target started no Python, or one out of reach (flags -I, -E, -S, or PYTHONPATH taken away)"
