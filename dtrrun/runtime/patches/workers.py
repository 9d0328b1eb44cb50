"""Finds out which processes are workers of a `DataLoader`.

On a CPU, what a worker has made comes in memory that it shares. It hardly ever writes to it again, so results
may be recomputed from it while its content has not changed (`core/foreign.py`).
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import dataloader

from dtrrun.runtime import storage
from dtrrun.runtime.patches.registry import Function, Patches


class Workers:
    """Patches what hands their batches to the program, while installed."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self) -> None:
        self._patches.wrap(dataloader._MultiProcessingDataLoaderIter, "_process_data", _noting_workers)

    def remove(self) -> None:
        self._patches.undo()


def _noting_workers(original: Function) -> Function:
    def process_data(iterator: Any, *args: Any) -> Any:
        storage.workers.update(worker.pid for worker in iterator._workers)
        return original(iterator, *args)

    return process_data
