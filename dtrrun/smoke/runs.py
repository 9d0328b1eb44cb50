"""One short run of the program with its output captured, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from dtrrun.launch.captured import Captured, run_captured
from dtrrun.launch.environment import child_environment
from dtrrun.launch.outcome import judge, read_marks
from dtrrun.launch.records import records_folder
from dtrrun.launch.watched import watched
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.advice import advice_of
from dtrrun.telemetry.driver import PER_PROCESS
from dtrrun.telemetry.record import Snapshot, by_rank, read_all
from dtrrun.telemetry.state import State, read_state

REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it, cuBLAS results may vary from run to run, and PyTorch warns about that."""


@dataclass(frozen=True)
class Run:
    """The outcome of a run. states: one for each training process, by rank."""

    ended: Captured
    error: str | None
    """Why it counts as failed; None for success."""
    snapshots: tuple[Snapshot, ...] = ()
    states: tuple[State, ...] = ()
    too_small: str | None = None
    """Where the budget was too small: `at least 37 MB for aten.mm; ...`."""

    @property
    def steps(self) -> int:
        return max((snapshot.counters["steps"] for snapshot in self.snapshots), default=0)

    @property
    def peak_bytes(self) -> int:
        return max(map(_peak, self.snapshots), default=0)

    @property
    def overhead_bytes(self) -> int | None:
        """Return what CUDA's context and libraries take on a GPU; None on the CPU."""
        on_gpu = (one.counters for one in self.snapshots if one.counters["device_index"] >= 0)
        return max((counters["overhead_bytes"] for counters in on_gpu), default=None)

    @property
    def warnings(self) -> list[str]:
        return [row["text"] for snapshot in self.snapshots for row in snapshot.rows("warnings")]

    def count(self, name: str) -> int:
        return sum(snapshot.counters[name] for snapshot in self.snapshots)

    @property
    def step_seconds(self) -> float | None:
        """Return the median of the steps after the first, for the slowest process."""
        steps = (snapshot.rows("latest_steps") for snapshot in self.snapshots)
        walls = ([row["wall_ns"] / 1e9 for row in rows if row["index"] > 1] for rows in steps)
        return max(map(median, filter(None, walls)), default=None)


def _peak(snapshot: Snapshot) -> int:
    """Return the memory that the budget limits: tensors on the CPU; all that the driver shows on a GPU."""
    counters, driver = snapshot.counters, snapshot.driver
    if counters["device_index"] < 0:
        return counters["peak_bytes"]
    shown = driver.peak_bytes if driver and driver.source in PER_PROCESS else 0
    return max(counters["footprint_peak_bytes"], shown)


def run_once(settings: RuntimeSettings, command: Sequence[str], patience: float) -> Run:
    """Run `command` under `settings` for at most `patience` seconds. Raises LaunchError."""
    with records_folder() as folder, watched(settings, folder) as shown:
        environment = child_environment(replace(settings, record_dir=folder))
        if settings.manual_seed is not None:
            environment = REPEATABLE | {"PYTHONHASHSEED": str(settings.manual_seed)} | environment
        ended = run_captured(command, environment, patience)
        snapshots = sorted(shown(read_all(folder)), key=lambda one: by_rank(one.meta.get("rank")))
        outcome = judge(ended.returncode, snapshots, read_marks(Path(folder)))
        told = (read_state(folder, one.pid) for one in snapshots)
        states = tuple(one for one in told if one is not None)
    error = outcome.absent or outcome.error
    too_small = next((said for one in snapshots if (said := _too_small(one))), None)
    if ended.timed_out:
        error = f"not done after {patience:.0f} s"
    elif ended.returncode < 0:
        error = f"ended by signal {-ended.returncode}"
    elif too_small:
        error = f"the budget is too small: it takes {too_small}"
    elif outcome.exit_status and not error:
        error = f"exit status {outcome.exit_status}"
    return Run(ended, error, tuple(snapshots), states, too_small)


def _too_small(snapshot: Snapshot) -> str | None:
    """Return how much an operator would have needed that the budget cannot hold."""
    error = snapshot.values("error")
    return None if error is None else advice_of(error)
