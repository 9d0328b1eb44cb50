"""Finds the memory that workers of a `DataLoader` have made.

On a CPU it is shared memory, which they hardly ever write to again. So results may be recomputed from it
while its content has not changed (`core/foreign.py`). Memory that the program itself shares with its workers
also comes back from them, and may be meant for them to write to.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions
from torch.utils.data import dataloader

from dtrrun.runtime import storage
from dtrrun.runtime.patches.registry import Function, Patches


class Workers:
    """Patches the functions that receive the workers' batches while installed."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._here = threading.local()

    def install(self) -> None:
        iterator = dataloader._MultiProcessingDataLoaderIter
        self._patches.wrap(iterator, "_try_get_data", self._receiving)
        # By file descriptor, and by name: `torch.multiprocessing.set_sharing_strategy`.
        self._patches.wrap(reductions, "rebuild_storage_fd", self._rebuilding)
        self._patches.wrap(reductions, "rebuild_storage_filename", self._rebuilding_by_name)

    def remove(self) -> None:
        self._patches.undo()
        storage.from_workers.clear()

    def _receiving(self, original: Function) -> Function:
        def receive(*args: Any, **kwargs: Any) -> Any:
            self._here.receives = True
            try:
                return original(*args, **kwargs)
            finally:
                self._here.receives = False

        return receive

    def _receives(self) -> bool:
        return getattr(self._here, "receives", False)

    def _rebuilding(self, original: Function) -> Function:
        def rebuild(cls: Any, df: Any, size: Any) -> Any:
            if not self._receives():
                return original(cls, df, size)
            opened = _Opened(df.detach())
            path = ""
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{opened.number}")
            return _noted(original(cls, opened, size), path)

        return rebuild

    def _rebuilding_by_name(self, original: Function) -> Function:
        def rebuild(cls: Any, manager: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(cls, manager, handle, *args, **kwargs)
            return _noted(made, os.fsdecode(handle)) if self._receives() else made

        return rebuild


class _Opened(NamedTuple):
    """Stands in for an object that was received as a file descriptor."""

    number: int

    def detach(self) -> int:
        return self.number


def _noted(made: Any, path: str) -> Any:
    # torch_(process that made it)_…: `NewProcessWideShmHandle` in aten/src/ATen/MapAllocator.cpp
    maker = path.rpartition("/")[2].removeprefix("torch_").partition("_")[0]
    if maker.isdigit() and int(maker) != os.getpid() and isinstance(made, torch.UntypedStorage):
        storage.note_from_worker(made)
    return made
