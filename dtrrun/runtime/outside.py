"""Makes room for storages that are created outside of operators, before they are allocated.

`torch.UntypedStorage(n)`, `copy.deepcopy`, `torch.load` and others call PyTorch's allocator directly. On a
CPU that is the native extension's (`dtrrun/native/heap.h`), which calls us first. Until a tensor over such a
storage is seen, which makes it a version, its bytes are subtracted from the budget of tensors. Memory shared
with other processes does not come from this allocator: the functions that create it are replaced.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.dispatch.threads import joins
from dtrrun.runtime.guards import below
from dtrrun.runtime.patches.registry import Function, Patches
from dtrrun.runtime.storage import rounded, size_of

SHARES = ("_share_fd_cpu_", "_share_filename_cpu_")
"""Methods that move a storage to shared memory, if it is not there yet."""

WHAT = "storages that are no tensor's"
MAKER = "a storage"


class Outside:
    """Counts such storages while installed; see `core.backend.Outside`."""

    def __init__(self, callbacks: Callbacks, native: ModuleType) -> None:
        self._callbacks, self._ledger = callbacks, callbacks.ledger
        self._eviction, self._native = callbacks.dtr.eviction, native
        self._patches = Patches()

    def install(self) -> None:
        self._native.ask_for_room(self._ask)
        self._ledger.outside = self
        for name in SHARES:
            self._patches.wrap(torch.UntypedStorage, name, self._sharing)
        self._patches.wrap(torch.UntypedStorage, "_new_shared", self._making_shared)

    def remove(self) -> None:
        self._patches.undo()
        self._native.ask_for_room(None)
        self._ledger.outside = None

    def _ask(self, nbytes: int) -> None:
        """Make room for a block of `nbytes` that is about to be allocated. Raises BudgetError."""
        ledger, nbytes = self._ledger, rounded(nbytes)
        with self._callbacks.lock:
            self._make_room(nbytes)
            self._set(self._native.outside() + nbytes)
            ledger.note_peak(ledger.resident_bytes + ledger.overhead[WHAT])

    def _make_room(self, nbytes: int) -> None:
        joins()
        with self._callbacks.lock:
            self._ledger.collect_dead()
            self.look()
            with self._callbacks.telling(), torch._C.DisableTorchFunction(), (guard := below()), guard:
                self._eviction.make_room(nbytes, MAKER)

    def _sharing(self, original: Function) -> Function:
        def share(storage: Any, *args: Any) -> Any:
            if not storage.is_shared():
                self._make_room(size_of(storage))
            return original(storage, *args)

        return share

    def _making_shared(self, original: Function) -> Function:
        def make(cls: Any, size: int, **device: Any) -> Any:
            if device.get("device", "cpu") == "cpu":
                self._make_room(rounded(size))
            return original(cls, size, **device)

        return make

    def met(self, storage: Any) -> None:
        if self._native.met_outside(storage):
            self.look()

    def look(self) -> None:
        self._set(self._native.outside())

    def _set(self, nbytes: int) -> None:
        ledger = self._ledger
        if nbytes:
            ledger.overhead[WHAT] = nbytes
        else:
            ledger.overhead.pop(WHAT, None)
        if ledger.budget_bytes is not None:
            ledger.set_limit(max(ledger.budget_bytes - nbytes, 0))
