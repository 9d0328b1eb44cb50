"""On a GPU: what the driver shows of a short run's processes, as `dtrrun run` asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dtrrun.launch.devices import resolve
from dtrrun.monitor.sampler import Sampler
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.record import Snapshot

Shown = Callable[[Sequence[Snapshot]], Sequence[Snapshot]]


@contextmanager
def watched(settings: RuntimeSettings, folder: str, nvml: Any = None) -> Iterator[Shown]:
    """While it lasts the processes that keep their records in `folder` are told the driver's figures.

    They keep inside the budget by these, so that a short run is like the one that it is made for. Yields what
    adds them to the records.
    """
    if not resolve(settings.device, nvml).startswith("cuda"):
        yield _as_they_are
        return
    with Sampler(folder, settings.budget_bytes, "warn", _nothing, nvml) as sampler:
        sampler.started(_nothing)
        yield sampler.shown


def _as_they_are(snapshots: Sequence[Snapshot]) -> Sequence[Snapshot]:
    return snapshots


def _nothing(_: Any) -> None:
    pass
