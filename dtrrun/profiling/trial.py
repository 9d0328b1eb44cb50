"""A short real run of the program, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dtrrun.launch.captured import Captured, run_captured
from dtrrun.launch.environment import child_environment
from dtrrun.launch.records import records_folder
from dtrrun.launch.watched import watched
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.fields import OVERHEADS
from dtrrun.telemetry.record import Snapshot, read_all

OK, TOO_SMALL, THRASH, FAILED = "ok", "too small", "thrash", "failed"
"""How a run ends: well; with the error that the budget is too small; given up; otherwise."""


class Step(NamedTuple):
    """One step as the run itself measured it."""

    number: int
    wall_ns: int
    overhead_ns: int
    """Recomputation and our own work."""
    operators_ns: int
    bookkeeping_ns: int
    """Of the overhead: all but the operators that ran again."""
    evictions: int
    rematerializations: int

    @property
    def own_ns(self) -> int:
        """What it would have taken without."""
        return max(self.wall_ns - self.overhead_ns, 1)


@dataclass(frozen=True)
class Trial:
    """One run. Where several processes trained: the steps are those of the slowest."""

    status: str
    returncode: int
    seconds: float
    """Of the whole command, start of the interpreter included."""
    peak_bytes: int
    """Of tensors."""
    steps: tuple[Step, ...]
    least_budget_bytes: int | None
    tail: str
    processes: int = 1
    overhead_bytes: int | None = None
    """What the driver shows beside the allocator's memory, of the process with most; None on the CPU."""
    log_error: str | None = None
    """Why the log that was asked for could not be written."""

    @property
    def slowdown(self) -> float | None:
        """Time over what the same steps take without a budget; the first step has much else in it."""
        return slowdown(self.steps)


def later(steps: Sequence[Step]) -> Sequence[Step]:
    """Without the first, which has the imports, the data and the model in it, if there are others."""
    return [step for step in steps if step.number > 1] or steps


def slowdown(steps: Sequence[Step]) -> float | None:
    steps = later(steps)
    own = sum(step.own_ns for step in steps)
    return sum(step.wall_ns for step in steps) / own if own else None


def run_trial(
    settings: RuntimeSettings, command: Sequence[str], patience: float, attend: Callable[[], None]
) -> Trial:
    """Run `command` under `settings`, which end it after a few steps. Raises LaunchError."""
    with records_folder() as folder, watched(settings, folder):
        environment = child_environment(replace(settings, record_dir=folder))
        ended = run_captured(command, environment, patience, attend)
        return judged(ended, read_all(folder))


def judged(ended: Captured, snapshots: Sequence[Snapshot]) -> Trial:
    """What the records of a run say of it."""
    trained = [snapshot for snapshot in snapshots if snapshot.counters["steps"]]
    steps = [_steps(snapshot.tables.get("latest_steps")) for snapshot in trained]
    errors = [error for one in snapshots if isinstance(error := one.tables.get("error"), dict)]
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
    )


def _status(ended: Captured, snapshots: Sequence[Snapshot], too_small: bool) -> str:
    if ended.timed_out:
        return THRASH
    if too_small:  # also where the program has caught the error and went on
        return TOO_SMALL
    if ended.returncode == 0:
        return OK
    warnings = [row for one in snapshots for row in one.tables.get("warnings") or [] if isinstance(row, dict)]
    stopped = any("(--on-thrash stop)" in str(row.get("text")) for row in warnings)
    return THRASH if stopped else FAILED


def _steps(table: Any) -> tuple[Step, ...]:
    rows = [row for row in table if isinstance(row, dict)] if isinstance(table, list) else []
    return tuple(map(_step, rows))


def _step(row: Mapping[str, Any]) -> Step:
    figures = {
        name: row.get(name) or 0
        for name in ("wall_ns", "operators_ns", *OVERHEADS, "evictions", "rematerializations")
    }
    overhead = sum(figures[name] for name in OVERHEADS)
    return Step(
        int(row.get("index") or 0),
        figures["wall_ns"],
        overhead,
        figures["operators_ns"],
        overhead - figures["rematerialization_ns"],
        figures["evictions"],
        figures["rematerializations"],
    )
