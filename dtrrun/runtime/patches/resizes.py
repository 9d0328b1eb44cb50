"""Follows `UntypedStorage.resize_`, which is not an operator: FSDP empties and fills its storages with it.

The ledger is updated, and room is made before a storage grows. A program that resizes a storage manages its
memory itself, so it is no longer evicted. Needed as long as PyTorch has no hook for a storage's size.
"""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.core.graph import Version
from dtrrun.core.locks import Locks
from dtrrun.runtime import storage as memory
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.dispatch.threads import joins
from dtrrun.runtime.guards import below, unseen
from dtrrun.runtime.patches.registry import Function, Patches
from dtrrun.runtime.storage import rounded


class Resizes:
    """Patches `resize_` of storages while installed."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks, self._dtr, self._ledger = callbacks, callbacks.dtr, callbacks.ledger
        self._patches = Patches()

    def install(self) -> None:
        self._patches.wrap(torch.UntypedStorage, "resize_", self._resizing)

    def remove(self) -> None:
        self._patches.undo()

    def _resizing(self, original: Function) -> Function:
        lock, ledger = self._callbacks.lock, self._ledger

        def resize_(storage: Any, size: int) -> Any:
            joins()
            with lock:
                ledger.collect_dead()
                version = ledger.version_of(storage)
                if version is None or memory.device_type_of(storage) != ledger.device_type:
                    return original(storage, size)
                version = self._taken_over(version)
                self._make_room(rounded(size) - version.nbytes)
                try:
                    with unseen():  # the allocator would ask for room once more
                        return original(storage, size)
                finally:  # also if interrupted after the resize
                    ledger.resized(version, memory.size_of(storage))

        return resize_

    def _taken_over(self, version: Version) -> Version:
        """Bring it back, and leave it to the program. Returns its new version."""
        with self._callbacks.telling():
            with Locks() as locks:
                self._dtr.rematerializer.lock([version], locks)
            self._dtr.mutation.written_outside(version, "resized by the program", escapes=True)
        return self._ledger.versions[version.key]

    def _make_room(self, nbytes: int) -> None:
        if nbytes <= 0:
            return
        with self._callbacks.telling(), (guard := below()), guard:
            self._dtr.eviction.make_room(nbytes, "UntypedStorage.resize_")
