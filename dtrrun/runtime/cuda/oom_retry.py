"""Out-of-memory retry: after an out-of-memory error, evict and run the operator again.

The ledger makes room before an operator runs, so this handles only what it cannot see: workspaces on the
first call, and fragmentation. When PyTorch's allocator refuses memory, storages are evicted immediately, in
the middle of the operator (`Retry.relieve`). The operator runs again if that did not help, or if a library
asked the driver directly, and only if it has certainly not begun to write (`retriable`).

PyTorch's convolutions would catch the error and let cuDNN try its other algorithms. The next one gives
different bits and stays selected for the thread (`try_configs` in aten/src/ATen/native/cudnn/Conv_v8.cpp). So
the native extension replaces the error by one that they do not catch (dtrrun/native/shortage.h).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from dtrrun.core.dtr import DTR
from dtrrun.runtime.cuda.budget import SEGMENT, SMALL_UNIT, Accounts
from dtrrun.runtime.cuda.observers import OomObservers
from dtrrun.runtime.cuda.pools import Pools
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.guards import below
from dtrrun.runtime.operators import Operator

ATTEMPTS = 3  # after the first
AN_OPERATOR = "an operator"

DID_WITHOUT = (
    "a GPU library got too little memory for its workspace and may have used another algorithm: results may "
    "differ in their last bits from those without a budget; a larger budget prevents that"
)
STILL_WITHOUT = (
    "earlier in this process, a GPU library got too little memory for its workspace and may have taken "
    "another algorithm, which PyTorch keeps until the process ends: results may differ in their last bits"
)
_done_without = False  # in this process

NO_ENGINE = "unable to find an engine to execute this computation"
"""The RuntimeError of a cuDNN convolution that lacks the memory for any of its algorithms."""

WENT_ON = "dtrrun: a library went on without this memory"
"""In the error of an operator that caught the allocator's error and returned (dtrrun/native/shortage.h)."""

LACKS_MEMORY = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory"
    r"|Triton Error \[(CUDA|HIP)\]: out of memory"
    r"|\b(CU|HIP|ROC)[A-Z]+_([A-Z_]+_)?(?<!_HOST_)ALLOC(ATION)?_FAILED\b"
    r"|\bmiopenStatusAllocFailed\b"
)
"""The RuntimeErrors of libraries that ask the driver for memory directly: for a kernel, a handle, a plan.

CUDA's runtime and driver, cuSPARSE and Triton say `out of memory`; in NVIDIA's and AMD's other libraries, the
status names share an ending. Failed allocations on the host are excluded.
"""

_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_REQUEST = re.compile(rf"Tried to allocate {_SIZE}")
_CAP = re.compile(rf"{_SIZE} allowed;")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_CACHED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_DEVICE = re.compile(r"\. GPU (\d+) has a total capacity")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def retriable(operator: Operator, *, random_state_known: bool) -> bool:
    """Return whether a call that ran out of memory can be repeated without side effects."""
    if operator.higher_order or operator.collective or operator.reshapes_storage:
        return False
    if operator.random and not random_state_known:
        return False
    if not operator.mutates:  # may still update running statistics, but only after all allocations
        return operator.replayable or operator.name.startswith("aten.")
    return operator.replayable and operator.allocates_first


def short_of_memory(error: BaseException, index: int) -> bool:
    """Return whether more memory on device `index` may help a call that raised `error`."""
    if isinstance(error, torch.OutOfMemoryError):
        named = _DEVICE.search(str(error))
        return not isinstance(error, BudgetError) and (named is None or int(named[1]) == index)
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return NO_ENGINE in text or LACKS_MEMORY.search(text) is not None


def requested(message: str) -> int:
    """Return the bytes that the allocator's error reports, to two decimals of its unit; 0 if it has none.

    This is what it would take from the driver: 2 MiB for everything up to 1 MiB, 20 MiB below 10 MiB.
    """
    return _size(_REQUEST, message) or 0


def missing(message: str) -> int:
    """Return by how much the allocator's cap was too low for the request, to within a segment."""
    asked = requested(message)
    allocated, cached, cap = (_size(pattern, message) for pattern in (_ALLOCATED, _CACHED, _CAP))
    if allocated is None or cached is None or cap is None:
        return asked
    return max(asked + allocated + cached - cap, 0) + SEGMENT


def _size(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


class Retry:
    """Runs calls that allocate memory, and retries them if necessary. `retries` counts the retries."""

    def __init__(
        self,
        gpu: Any,
        accounts: Accounts,
        pools: Pools,
        dtr: DTR,
        callbacks: Callbacks,
        alert: Callable[[str], None],
    ) -> None:
        self.gpu, self._pools, self._alert = gpu, pools, alert
        self.accounts = accounts
        self._dtr, self._ledger, self._callbacks = dtr, dtr.ledger, callbacks
        self.retries = 0
        self.lifted = False  # the cap is removed for good: exceed the budget rather than run out of memory
        self.refused: int | None = None
        """Bytes that were refused to an operator of the program, which is attempted next."""
        self.is_relieving = False  # a request is refused that has not been counted yet
        self.observers = OomObservers()
        self.refusals = 0  # refusals of the allocator that were seen as errors
        self.flushes: Any = None  # the extension's `Flushes`, which evicts before the allocator flushes

    def use(self, native: Any, place: int) -> None:
        """Use the extension. place: of the device among the session's."""
        self._native = native
        parts = self._ledger, self._callbacks.lock, self.gpu, self.accounts, self._pools
        self.flushes = native.Flushes(*parts, partial(self.gpu.follows_blocks, native), place)

    def attempt(self, run: Callable[[], Any], name: str, wanted: int, *, ran: bool = True) -> Any:
        """Call run(), and again after an out-of-memory error, up to `ATTEMPTS` times, and once more if a new
        measurement leaves more room; then raise BudgetError. If a library has gone on without the memory, it
        may keep to what it did: raise BudgetError at once.

        wanted: bytes that it will allocate, as far as known. ran: it has succeeded before, so it fails only
        for lack of memory.
        """
        if self._ledger.budget_bytes is None:
            return run()
        refused, self.refused = self.refused, None
        if refused is not None:  # it has already run once
            self._release(0, max(wanted, refused), refused)
        for attempt in range(refused is not None, ATTEMPTS + 2):
            try:
                result = run()
                self.observers.survived()
                return result
            except RuntimeError as error:
                if not short_of_memory(error, self.gpu.index):
                    raise
                self.met(error)
                if attempt >= ATTEMPTS and not ran and not isinstance(error, torch.OutOfMemoryError):
                    raise
                asked, lacking = requested(str(error)), missing(str(error))
                if not isinstance(error, torch.OutOfMemoryError):
                    self._lower(SEGMENT)  # a library has asked the driver
                again = self._runs_again and isinstance(error, torch.OutOfMemoryError)
                went_on = WENT_ON in str(error)
            # The error has been released, and with it whatever its traceback kept alive.
            if went_on:
                self.did_without()
                break
            if asked > wanted + wanted // 100:  # by more than rounding
                wanted = asked + asked // 100
            if again:
                break
            if attempt < ATTEMPTS:
                self._release(attempt, wanted, asked)
            elif attempt > ATTEMPTS or not self._dtr.eviction.refresh():
                break
        if self._dtr.eviction.warn_only:
            self.gpu.set_cap(None)
            self.lifted = True
            self._dtr.eviction.over_budget += 1
            self.observers.survived()
            return run()
        if not went_on and not again and self._raise(wanted, name, lacking):
            self.observers.survived()
            return self.attempt(run, name, wanted, ran=ran)
        self._refuse(wanted, name, lacking)

    def _refuse(self, nbytes: int, name: str, lacking: int) -> NoReturn:
        self.observers.reached_program()
        too_small: Any = self._dtr.eviction.too_small(nbytes, name, missing=lacking)
        self._callbacks.too_small(too_small)
        raise too_small

    def once(self, run: Callable[[], Any], name: str) -> Any:
        """Call run() without retrying, since it may have begun to write. Out of memory: raise BudgetError."""
        try:
            return run()
        except torch.OutOfMemoryError as error:
            found = self._refusal(error)
            if found is None:
                raise
        # The error has been released, and with it whatever its traceback kept alive.
        self._refuse(found[0], name, found[1])

    def refuse(self, error: BaseException, name: str) -> None:
        """Raise BudgetError if an operator's error is the allocator's refusal under our cap."""
        found = self._refusal(error)
        if found is not None:
            self._refuse(found[0], name, found[1])

    def _refusal(self, error: BaseException) -> tuple[int, int] | None:
        """Return the bytes that the allocator refused under our cap, and how many were missing; or None."""
        limited = self._ledger.budget_bytes is not None and not self._dtr.eviction.warn_only
        ours = isinstance(error, torch.OutOfMemoryError) and short_of_memory(error, self.gpu.index)
        asked, free = requested(str(error)), _size(_FREE, str(error))
        if not (limited and ours) or (free is not None and free < asked):  # the device itself is full
            return None
        self.met(error)
        return asked, missing(str(error))

    def relieve(self, nbytes: int, attempt: int) -> bool | None:
        """Evict for a request that the allocator refuses, perhaps in the middle of an operator.

        Returns whether to ask the allocator again; None if a library may do without the memory.
        """
        ledger, cap = self._ledger, self.accounts.cap
        if ledger.budget_bytes is None or cap is None or not self.gpu.is_current():
            return None
        self.is_relieving = True
        try:
            return self._relieve(nbytes, attempt, cap)
        finally:
            self.is_relieving = False

    def _relieve(self, nbytes: int, attempt: int, cap: int) -> bool | None:
        ledger = self._ledger
        if attempt == 0 and self._lower(self._native.growth_for(nbytes)):
            cap = self.accounts.cap or cap
        most = ATTEMPTS - 1 if self._runs_again else ATTEMPTS
        if not ledger.evicting or attempt >= most or nbytes > cap:
            lacking = self.gpu.statistics().reserved + self._native.growth_for(nbytes) - cap
            if self._runs_again or not self._raise(nbytes, AN_OPERATOR, max(lacking, 0) + SEGMENT):
                return None if self.lifted else False
        self.refusals += 1
        self.observers.survived()
        self._release(attempt, nbytes, nbytes)
        return True

    @property
    def _runs_again(self) -> bool:
        """Whether an operator that gets an error is run again once less is locked (`core/rematerialize.h`).

        Everything else would be evicted in vain where what is locked leaves no room.
        """
        return bool(self._dtr.eviction.replaying) and not self._dtr.eviction.warn_only

    def _raise(self, nbytes: int, name: str, lacking: int) -> bool:
        """Raise the budget for a request that nothing else helps, if there is memory and it may be raised."""
        eviction = self._dtr.eviction
        if eviction.adapting is None or self._ledger.budget_bytes is None:
            return False
        with self._callbacks.lock, (guard := below()), guard:
            return bool(eviction.adapting.too_small(eviction.refusal_of(nbytes, name, missing=lacking)))

    def _lower(self, growth: int) -> bool:
        """Lower the budget if the device does not have the memory that it leaves for the allocator.

        growth: what is asked of the driver, in bytes. Returns whether that was done.
        """
        adapting, cap = self._dtr.eviction.adapting, self.accounts.cap
        if adapting is None or cap is None:
            return False
        used, total = self.gpu.used_and_total()
        there = self.gpu.statistics().reserved + max(total - used, 0)
        if total - used >= growth or there >= cap:
            return False
        with self._callbacks.lock, (guard := below()), guard:
            return bool(adapting.refused(self.accounts.overhead + there))

    def did_without(self) -> None:
        """Note that a library has done without memory, as it may from now on in this process."""
        global _done_without
        _done_without = True
        self._alert(DID_WITHOUT)

    def began(self, ooms: int) -> None:
        """Start counting the allocator's refusals, of which there have been `ooms`."""
        self.unseen(ooms)
        if _done_without:
            self._alert(STILL_WITHOUT)

    def met(self, error: BaseException) -> None:
        """Note a reported error, to distinguish it from refusals that raised none."""
        if getattr(error, "dtrrun_met", False):  # it passes through several handlers
            return
        error.dtrrun_met = True  # type: ignore[attr-defined]
        if isinstance(error, torch.OutOfMemoryError):
            self.refusals += 1
        elif NO_ENGINE in str(error):
            self.refusals = self.gpu.statistics().ooms  # one for each algorithm

    def unseen(self, ooms: int) -> bool:
        """Return whether any of the allocator's `ooms` refusals since the last call raised no error.

        If so, a library has caught the error and done without the memory.
        """
        if self.is_relieving:
            return False
        before, self.refusals = self.refusals, ooms
        return ooms > before

    def _release(self, attempt: int, wanted: int, asked: int) -> None:
        with self._callbacks.lock:
            if attempt > 1 and self._ledger.evicting:
                self._dtr.garbage.without_room(certain=True)  # finalizers run without the lock
            self._let_go(attempt, wanted, asked)
        self.retries += 1

    def _let_go(self, attempt: int, wanted: int, asked: int) -> None:
        """Evict more at each attempt: a block, or its bytes anywhere; a dear one, or twice its bytes; all."""
        ledger = self._ledger
        ledger.collect_dead()
        if not ledger.evicting:
            self.gpu.empty_cache()
            return  # eviction is disabled
        with (guard := below()), guard:
            small = 0 < asked <= SMALL_UNIT
            block = SMALL_UNIT // 2 if small else wanted
            if attempt <= 1 and self.flushes.evict_window(
                block, -1 if attempt else self._native.most_ns(0, wanted)
            ):
                return
            if self.accounts.cap is not None:
                allocated = self.gpu.statistics().allocated
                self.accounts.stranded = self._pools.stranded_bytes()
                self.accounts.request_failed(allocated, wanted)
                ledger.set_limit(self.accounts.limit(allocated, ledger.resident_bytes))
            if attempt == 0:
                self._dtr.eviction.release(wanted)
                return
            if attempt == 1:
                self._dtr.eviction.release(2 * wanted)
            else:
                self._dtr.eviction.release(ledger.resident_bytes)
            self.gpu.empty_cache()
