"""On a GPU: gives a short run's processes the driver's figures, as `dtrrun run` does."""

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
    """Context in which the processes with records in `folder` receive the driver's figures.

    They use these to keep inside the budget, so that a short run behaves like a full one. Yields a function
    that adds the figures to the records.
    """
    if not resolve(settings.device, nvml=nvml).startswith("cuda"):
        yield lambda snapshots: snapshots
        return
    with Sampler(folder, settings.budget_bytes, "warn", lambda _: None, lambda _: None, nvml) as sampler:
        sampler.started(lambda _: None)
        yield sampler.shown
