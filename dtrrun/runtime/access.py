"""Access to a tensor's memory by code that is not an operator: locked, pinned, or handed out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns as now_ns

import torch

from dtrrun.core.graph import Version
from dtrrun.core.locks import Locks
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.dispatch.threads import joins
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.guards import untraced
from dtrrun.runtime.storage import storage_of

unseen = torch._C.DisableTorchFunction
"""Context that hides our use of tensors from the program's function modes and subclasses."""

RECENT = (64, 16, 4)
"""How many of the most recently used versions stay while one comes back for waiting native code. If they
leave too little room, the next number is tried."""


@contextmanager
def _unnoticed() -> Iterator[None]:
    """`unseen`, and hidden from `torch.jit.trace` as well."""
    with unseen(), untraced():
        yield


def _nothing() -> None:
    """What ends an access for which nothing has been done."""


Reach = Callable[[torch.Tensor, bool, bool], Callable[[], None]]
"""reach(tensor, writes, escapes) makes the memory safe to access. Returns a function that ends the access.

Memory that escapes but is not written to stays resident, and may be recomputed from.
"""


class Access:
    """Keeps tensors in memory for escapes, custom functions and the program itself."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks, self._dtr, self._ledger = callbacks, callbacks.dtr, callbacks.ledger

    def _version(self, tensor: torch.Tensor) -> Version | None:
        if tensor.device.type != self._ledger.device_type:
            return None
        return self._callbacks.version_of(tensor)

    def _join(self, tensors: list[torch.Tensor]) -> None:
        ours = self._ledger.device_type
        if any(tensor.device.type == ours for tensor in tensors):
            joins()

    def pin(self, tensor: torch.Tensor, why: str) -> None:
        """Keep a tensor's storage in memory from now on. Raises BudgetError."""
        with _unnoticed():
            self._pin(tensor, why)

    def _pin(self, tensor: torch.Tensor, why: str) -> None:
        self._join([tensor])
        with self._callbacks.lock, self._locked([tensor]) as locks:
            for version in locks:
                self._dtr.recipes.pin(version, why)

    def keep_weight(self, tensor: torch.Tensor) -> None:
        """Keep a tensor that will be trained: an evicted weight would have to come back for every use.

        Raises BudgetError.
        """
        with _unnoticed(), suppress(NotImplementedError, RuntimeError):  # no plain storage
            version = self._ledger.version_of(storage_of(tensor))
        if version is not None and version.operation is not None:
            self.pin(tensor, "parameter")

    def lock(self, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """Keep storages in memory until the returned function is called. Raises BudgetError."""
        if self._callbacks.native.stay(tensors):
            return _nothing
        with self._callbacks.own(), _unnoticed():
            self._join(tensors)
            with self._callbacks.lock:
                unlock = self._locked(tensors)
                observers = self._ledger.observers
                if not observers:
                    return unlock
                told = [observer.locked(list(unlock)) for observer in observers]

        def ended() -> None:
            while told:
                told.pop()()
            unlock()

        return ended

    def _locked(self, tensors: list[torch.Tensor]) -> Locks:
        """Make the versions of tensors resident, and return locks on them."""
        locks = Locks()
        began = now_ns()
        while True:
            self._ledger.collect_dead()  # a new storage may have the id of one that died
            versions = [version for tensor in tensors if (version := self._version(tensor)) is not None]
            try:
                self._dtr.rematerializer.lock(versions, locks)
                return locks
            except BudgetError as error:
                if not (self._callbacks.others_end() or self._callbacks.found_garbage(began)):
                    self._callbacks.too_small(error)
                    raise

    def hold(self, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """Like `lock`, but do not enter storages unknown to the ledger, since they are in memory."""
        known = []
        for tensor in tensors:
            with _unnoticed(), suppress(NotImplementedError, RuntimeError):  # sparse or opaque
                if self._ledger.version_of(storage_of(tensor)) is not None:
                    known.append(tensor)
        return self.lock(known)

    def lock_storage(self, storage: torch.UntypedStorage, *, writes: bool) -> Callable[[], None]:
        """Like `lock`, for a storage; one that is unknown to the ledger is in memory. Raises BudgetError.

        writes: whether it is about to be filled, as part of its making.
        """
        with self._callbacks.own(), _unnoticed(), self._callbacks.lock:
            self._ledger.collect_dead()
            version = self._ledger.version_of(storage)
            locks = Locks()
            if version is not None:
                self._dtr.rematerializer.lock([version], locks)
                if writes:
                    self._ledger.forget_host_copy(version)
            return locks

    @property
    def constants_leave(self) -> bool:
        """Whether weights and state may leave for the host, so that not all need fit at once."""
        return self._ledger.constants_leave

    def reach(self, tensor: torch.Tensor, writes: bool, escapes: bool) -> Callable[[], None]:
        """Prepare an escape's access to the memory of `tensor`. Return a function that ends the access."""
        unlock = self.lock([tensor])
        if writes or escapes:
            try:
                with self._callbacks.own(), _unnoticed():
                    if writes:
                        self._hand_out(tensor, escapes)
                    else:
                        self._keep(tensor)
            except BaseException:
                unlock()
                raise
        return unlock

    def touched(self, version: Version, settle: Callable[[], bool]) -> None:
        """Bring back an evicted storage whose memory code other than an operator touches by its address.

        settle: moves the restored memory to that address, where it stays. It returns False if the system has
        no memory. Raises BudgetError, and MemoryError.
        """
        with _unnoticed(), self._callbacks.lock, Locks() as locks:
            joins()
            self._bring_back(version, locks)
            # Its memory is about to be moved: wait until no other thread uses it.
            while (found := self._callbacks.left_by_others(version)) is not version:
                version = found
                self._bring_back(version, locks)
            if not settle():
                raise MemoryError("the system has no memory for it")
            self._dtr.mutation.written_outside(version, "read by address", escapes=True)

    def _bring_back(self, version: Version, locks: Locks) -> None:
        """Lock a version in memory, alongside the most recently used ones.

        The code that is waiting for it may already hold their addresses.
        """
        self._ledger.collect_dead()
        resident = [one for one in self._ledger.versions.values() if one.resident]
        for count in RECENT:
            recent = Locks()
            with recent:
                recent.take(heapq.nlargest(count, resident, key=lambda one: (one.last_access, one.age)))
                try:
                    return self._dtr.rematerializer.lock([version], locks)
                except BudgetError:
                    locks()
                    if count == RECENT[-1]:
                        raise

    def _keep(self, tensor: torch.Tensor) -> None:
        with self._callbacks.lock:
            version = self._version(tensor)
            if version is not None:
                self._ledger.fix(version)
                if version.operation is not None:
                    self._dtr.recipes.pin(version, "handed out to be read")

    def _hand_out(self, tensor: torch.Tensor, escapes: bool) -> None:
        with self._callbacks.lock, self._callbacks.telling():
            version = self._version(tensor)
            while version is not None and self._callbacks.turns.wait_for_replays([version]):
                version = self._version(tensor)
            if version is not None:
                why = "handed out" if escapes else "written outside"
                self._dtr.mutation.written_outside(version, why, escapes=escapes)
