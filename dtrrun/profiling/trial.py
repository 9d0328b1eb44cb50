"""A short real run of the program, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dtrrun.launch.captured import Captured, run_captured
from dtrrun.launch.environment import child_environment
from dtrrun.launch.errors import BY_SIGNAL
from dtrrun.launch.outcome import Marks, judge, read_marks
from dtrrun.launch.ranks import Ranks
from dtrrun.launch.records import records_folder
from dtrrun.launch.watched import watched
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.fields import ENOUGH_STEPS, OVERHEADS
from dtrrun.telemetry.record import Snapshot, read_all

OK, TOO_SMALL, THRASH, FAILED = "ok", "too small", "thrash", "failed"
"""Outcomes of a run: success; budget error; stopped because too slow; any other failure."""
NO_MARKS = Marks()


class MeasuredStep(NamedTuple):
    """One step as measured by the run itself."""

    number: int
    wall_ns: int
    overhead_ns: int
    """Recomputation and dtrrun's own work."""
    operators_ns: int
    bookkeeping_ns: int
    """The part of the overhead that is neither recomputation nor copies to the host and back."""
    evictions: int
    rematerializations: int

    @property
    def own_ns(self) -> int:
        """Return the time without the overhead."""
        return max(self.wall_ns - self.overhead_ns, 1)


@dataclass(frozen=True)
class Trial:
    """One run. If several processes trained, the steps are those of the slowest."""

    status: str
    returncode: int
    seconds: float
    """Duration of the whole command, including interpreter startup."""
    peak_bytes: int
    """Peak of tensor memory."""
    steps: tuple[MeasuredStep, ...]
    least_budget_bytes: int | None
    tail: str
    processes: int = 1
    overhead_bytes: int | None = None
    """Memory that the driver shows beyond the allocator's: the most of any process; None on the CPU."""
    log_error: str | None = None
    """Why the requested log could not be written."""
    absent: str | None = None
    """Why no process of the program ran under dtrrun."""
    largest_rank: int = 0
    """The rank whose tensors have taken the most; 0 if none of the processes has a rank."""
    host_bytes: int = 0
    """The most that copies on the host have taken together, in any process."""

    @property
    def exit_status(self) -> int:
        """Return the exit status as a shell tells it."""
        return self.returncode if self.returncode >= 0 else BY_SIGNAL - self.returncode

    @property
    def slowdown(self) -> float | None:
        """Return the time relative to that without a budget, excluding the first step."""
        return slowdown(self.steps)

    @property
    def told_slowdown(self) -> float | None:
        """Return `slowdown` as it is told to users: None if there are too few steps to say, or it failed."""
        return self.slowdown if self.status == OK and len(self.steps) >= ENOUGH_STEPS else None


def later(steps: Sequence[MeasuredStep]) -> Sequence[MeasuredStep]:
    """Return all steps, without the first (imports, data and model setup) if there are others."""
    return [step for step in steps if step.number > 1] or steps


def slowdown(steps: Sequence[MeasuredStep]) -> float | None:
    steps = later(steps)
    own = sum(step.own_ns for step in steps)
    return sum(step.wall_ns for step in steps) / own if own else None


def run_trial(
    settings: RuntimeSettings, command: Sequence[str], patience: float, attend: Callable[[], None]
) -> Trial:
    """Run `command` under `settings`, which stop it after a few steps. Raises LaunchError."""
    with records_folder() as folder, watched(settings, folder), Ranks(folder):
        environment = child_environment(replace(settings, record_dir=folder))
        ended = run_captured(command, environment, patience, attend)
        return judged(ended, read_all(folder), read_marks(Path(folder)))


def judged(ended: Captured, snapshots: Sequence[Snapshot], marks: Marks = NO_MARKS) -> Trial:
    """Return the result of a run according to its records and marks."""
    outcome = judge(ended.returncode, snapshots, marks)
    trained = [snapshot for snapshot in snapshots if snapshot.counters["steps"]]
    steps = [tuple(map(_step, snapshot.rows("latest_steps"))) for snapshot in trained]
    errors = [error for one in snapshots if (error := one.values("error")) is not None]
    least = max((int(error.get("least_budget_bytes") or 0) for error in errors), default=0)
    return Trial(
        _status(ended, snapshots, bool(errors)),
        ended.returncode,
        ended.seconds,
        max((snapshot.counters["peak_bytes"] for snapshot in snapshots), default=0),
        max(steps, key=lambda found: slowdown(found) or 0.0, default=()),
        least or None,
        ended.tail,
        len(trained),
        max(
            (one.counters["overhead_bytes"] for one in trained if one.counters["device_index"] >= 0),
            default=None,
        ),
        next((error for one in snapshots if (error := one.tables.get("log_error"))), None),
        outcome.absent or outcome.error,
        _largest_rank(trained),
        max((snapshot.counters["host_peak_bytes"] for snapshot in snapshots), default=0),
    )


def _largest_rank(snapshots: Sequence[Snapshot]) -> int:
    peaks = {
        rank: one.counters["peak_bytes"] for one in snapshots if isinstance(rank := one.meta.get("rank"), int)
    }
    return max(sorted(peaks), key=peaks.__getitem__, default=0)


def _status(ended: Captured, snapshots: Sequence[Snapshot], too_small: bool) -> str:
    if ended.timed_out:
        return THRASH
    if too_small:  # even if the program caught the error and continued
        return TOO_SMALL
    if ended.returncode == 0:
        return OK
    warnings = (row for one in snapshots for row in one.rows("warnings"))
    stopped = any("(--on-thrash stop)" in str(row.get("text")) for row in warnings)
    return THRASH if stopped else FAILED


def _step(row: Mapping[str, Any]) -> MeasuredStep:
    figures = {
        name: row.get(name) or 0
        for name in ("wall_ns", "operators_ns", *OVERHEADS, "evictions", "rematerializations")
    }
    overhead = sum(figures[name] for name in OVERHEADS)
    return MeasuredStep(
        int(row.get("index") or 0),
        figures["wall_ns"],
        overhead,
        figures["operators_ns"],
        overhead - figures["rematerialization_ns"] - figures["host_ns"],
        figures["evictions"],
        figures["rematerializations"],
    )
