"""Out of memory is an event, not an end: the ledger releases what it can, and the operator runs again.

The ledger makes room before an operator runs, so that this is left for what it cannot see: workspaces on the
first call, and holes between blocks. Only what certainly had not begun to write is run again (`retriable`).

PyTorch's convolutions catch the error themselves and let cuDNN try its other algorithms, of which the next
has other bits and stays the thread's choice (`try_configs` in aten/src/ATen/native/cudnn/Conv_v8.cpp). So
their workspace is provided beforehand; and where no algorithm is left, they raise something else.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from dtrrun.ledger.record import Record
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.guards import below
from dtrrun.runtime.holes import best_hole
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.shares import Accounts

NO_LIMIT = 1 << 62
ATTEMPTS = 3  # after the first
OVER_BUDGET = "{operator} did not fit into the GPU's budget, and has taken more (--over-budget warn)"

ALLOCATES_FIRST = {
    "aten.addmm_",
    "aten.baddbmm_",
    "aten.addmv_",
    "aten.index_put_",
    "aten._index_put_impl_",
    "aten.index_add_",
    "aten.scatter_add_",
    "aten.masked_fill_",
}
"""In-place operators whose CUDA kernels get all of their workspace before they write to their target."""

NO_ENGINE = "unable to find an engine to execute this computation"
"""What a cuDNN convolution raises (RuntimeError) if it has memory for none of its algorithms."""

FROM_THE_DRIVER = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
"""What is raised (RuntimeError) where the driver itself was asked: for a kernel to load, a cuBLAS handle."""

SMALL_REQUEST = 2 << 20
"""What the error names for a request of up to 1 MiB, which is served from a pool of its own."""

_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_DEVICE = re.compile(r"\. GPU (\d+) has a total capacity")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def retriable(operator: Operator, *, random_state_known: bool) -> bool:
    """Whether a call that ended for want of memory can be repeated as if it had never been."""
    if operator.higher_order or operator.collective or operator.reshapes_storage:
        return False
    if operator.random and not random_state_known:
        return False
    if not operator.mutates:  # running statistics included: their kernels come after all allocations
        return operator.replayable or operator.name.startswith("aten.")
    return operator.replayable and (
        operator.overwrites or operator.pointwise or operator.name in ALLOCATES_FIRST
    )


def short_of_memory(error: BaseException, index: int) -> bool:
    """Whether more memory on device `index` may help a call that raised `error`."""
    if isinstance(error, torch.OutOfMemoryError):
        named = _DEVICE.search(str(error))
        return not isinstance(error, BudgetError) and (named is None or int(named[1]) == index)
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in (NO_ENGINE, *FROM_THE_DRIVER)
    )


def requested(message: str) -> int:
    """The bytes that the allocator's error names, to two decimals of its unit; 0 if it names none.

    They are those that it would take from the driver: 2 MiB for all up to 1 MiB, 20 MiB below 10 MiB.
    """
    found = _REQUEST.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


class Relief:
    """Runs what allocates, again if need be. `retries` counts how often."""

    def __init__(self, gpu: Any, accounts: Accounts, careful: Any, warn: Callable[[str], None]) -> None:
        self.gpu = gpu
        self.accounts = accounts
        self._careful = careful
        self._ledger = careful.ledger
        self._warn = warn
        self.retries = 0
        self.lifted = False  # the cap, for good: over the budget rather than out of memory
        self.refused: int | None = None
        """Bytes that the short cut's operator, which comes next, asked for in vain."""
        self.refusals = 0  # of the allocator, that were seen as errors

    def attempt(self, run: Callable[[], Any], name: str, wanted: int, *, ran: bool = True) -> Any:
        """run(), and again after an out-of-memory error, at most `ATTEMPTS` times; then BudgetError.

        wanted: bytes that it will allocate, as far as is known. ran: as much has run before, so that it lacks
        nothing but memory.
        """
        if self._ledger.budget_bytes is None:
            return run()
        refused, self.refused = self.refused, None
        if refused is not None:  # it was run once already
            self._release(0, max(wanted, refused), refused)
        for attempt in range(refused is not None, ATTEMPTS + 1):
            try:
                return run()
            except RuntimeError as error:
                if not short_of_memory(error, self.gpu.index):
                    raise
                self.met(error)
                if attempt == ATTEMPTS and not ran and not isinstance(error, torch.OutOfMemoryError):
                    raise
                asked = requested(str(error))
            # The error is gone, and with it what its traceback held.
            if asked > wanted + wanted // 100:  # it is not merely rounded
                wanted = asked + asked // 100
            if attempt == ATTEMPTS:
                break
            self._release(attempt, wanted, asked)
        if self._ledger.warn_only:
            self.gpu.set_cap(None)
            self.lifted = True
            self._ledger.over_budget += 1
            self._warn(OVER_BUDGET.format(operator=name))
            return run()
        too_small = self._ledger._too_small(wanted, name)
        self._careful.too_small(too_small)
        raise too_small

    def provide(self, sizes: Sequence[int]) -> None:
        """See to it that blocks of these sizes can be had together, if that is possible. Raises nothing."""
        if self._ledger.budget_bytes is None:
            return
        for attempt in range(ATTEMPTS + 1):
            try:
                self.gpu.take(sizes)
                return
            except torch.OutOfMemoryError as error:
                self.met(error)
                asked = requested(str(error))
            if attempt < ATTEMPTS:
                self._release(attempt, max(sum(sizes), asked), asked)

    def met(self, error: BaseException) -> None:
        """An error that someone is told of: what the allocator has refused beside these, nobody was."""
        if getattr(error, "dtrrun_met", False):  # on its way through several handlers
            return
        error.dtrrun_met = True  # type: ignore[attr-defined]
        if isinstance(error, torch.OutOfMemoryError):
            self.refusals += 1
        elif NO_ENGINE in str(error):
            self.refusals = self.gpu.statistics().ooms  # one for each algorithm

    def unseen(self, ooms: int) -> bool:
        """Whether the allocator, which has refused so often by now, did so without an error since last asked.

        Then a library has caught it, and has done without the memory.
        """
        before, self.refusals = self.refusals, ooms
        return ooms > before

    def _release(self, attempt: int, wanted: int, asked: int) -> None:
        with self._careful.lock:
            self._let_go(attempt, wanted, asked)
        self.retries += 1

    def _let_go(self, attempt: int, wanted: int, asked: int) -> None:
        """More at each attempt: one hole, then twice the bytes wherever they lie, then all that there is."""
        ledger = self._ledger
        ledger.drain()
        if ledger.limit >= NO_LIMIT:
            self.gpu.empty_cache()
            return  # nothing may be evicted for now
        if self.accounts.cap is not None:
            allocated = self.gpu.statistics().allocated
            self.accounts.request_failed(allocated, wanted)
            ledger.limit = self.accounts.limit(allocated, ledger.resident_bytes)
        with (guard := below()), guard:
            if attempt == 0:
                if not self._make_hole(SMALL_REQUEST // 2 if 0 < asked <= SMALL_REQUEST else wanted):
                    self._evict(wanted)
                return
            if attempt == 1:
                self._evict(2 * wanted)
            else:
                gc.collect()
                self._evict(ledger.resident_bytes)
            self.gpu.empty_cache()

    def _evict(self, nbytes: int) -> None:
        ledger = self._ledger
        limit, over_budget = ledger.limit, ledger.over_budget
        ledger.limit = max(ledger.resident_bytes - nbytes, 0)
        try:
            with suppress(BudgetError):
                ledger.make_room(0, "an operator that ran out of memory")
        finally:
            ledger.limit, ledger.over_budget = limit, over_budget

    def _make_hole(self, wanted: int) -> bool:
        """Evict neighbours, at the least sum of cost over staleness (h_DTR times size)."""
        ledger = self._ledger
        by_address: dict[int, Record] = {}
        for record in (*ledger.records.values(), *ledger.held.values()):
            if record.resident and record.op is not None and not record.locks:
                storage = record.memory()
                if storage is not None:
                    by_address[address_of(storage)] = record
        clock = ledger.clock

        def price(address: int) -> float | None:
            record = by_address.get(address)
            return None if record is None else record.cost / max(clock - record.last_access, 1)

        hole = best_hole(self.gpu.segments(wanted), wanted, price)
        if not hole:
            return False
        if not ledger.pressure:
            ledger._begin_pressure()
        for address in hole:
            record = by_address.pop(address)
            if not ledger._evictable(record):
                return False
            ledger.evict(record)
        return True


address_of: Any = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
