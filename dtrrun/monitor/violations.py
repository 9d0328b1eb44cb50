"""Compares the budget with what the driver shows, by process, and phrases violations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtrrun.sizes import format_size
from dtrrun.telemetry.driver import SOURCES, DriverUse, Figure
from dtrrun.telemetry.record import Snapshot

NAMED: Mapping[str, str] = {
    "nvml_pid": "NVML",
    "kfd_pid": "KFD, AMD's driver",
    "nvml_new_pid": "NVML, the one new process",
    "device_delta": "growth of the device's use",
    "reserved_overhead": "reserved and overhead, estimated",
}
assert tuple(NAMED) == SOURCES


@dataclass
class Tally:
    """One process's readings so far."""

    use: DriverUse | None = None
    over: bool = False
    """Whether the last reading was over the budget."""

    def add(self, device: str, figure: Figure, budget: int | None) -> bool:
        """Enter a reading. Returns whether it newly exceeds the budget (bytes; None: there is none)."""
        before = self.use or DriverUse(device, 0, 0, figure.source)
        beyond = max(0, figure.nbytes - budget) if budget is not None else 0
        crossed = beyond > 0 and not self.over
        self.over = beyond > 0
        self.use = DriverUse(
            device=device,
            nbytes=figure.nbytes,
            peak_bytes=max(before.peak_bytes, figure.nbytes),
            source=figure.source,
            violations=before.violations + crossed,
            most_over_bytes=max(before.most_over_bytes, beyond),
        )
        return crossed


def budget_of(snapshot: Snapshot, budget: int | None) -> int | None:
    """Return the budget of one process: the run's, or a larger one set by the script. None: it has none.

    A smaller one is not checked here, since the process may aim for less than the run requires.
    """
    counted = snapshot.counters.get("budget_bytes", 0)
    if counted <= 0:
        return budget if counted == 0 else None
    return max(counted, budget or 0)


def exceeded(snapshot: Snapshot, figure: Figure, budget: int) -> str:
    """`rank 1 holds 6.21 GB on its GPU (NVML), 212 MB over the budget of 6 GB (6,212,345,678 bytes)`."""
    rank = snapshot.meta.get("rank")
    who = f"pid {snapshot.pid}" if rank is None else f"rank {rank}"
    return (
        f"{who} holds {format_size(figure.nbytes)} on its GPU ({NAMED[figure.source]}), "
        f"{format_size(figure.nbytes - budget)} over the budget of {format_size(budget)} "
        f"({figure.nbytes:,} bytes)"
    )
