"""Out of memory is an event, not an end: the ledger releases what it can, and the operator runs again.

The ledger makes room before an operator runs, so that this is left for what it cannot see: workspaces on the
first call, and holes between blocks. Only what certainly had not begun to write is run again (`retriable`).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
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

_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
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


def requested(message: str) -> int:
    """The bytes that the allocator's error names, to two decimals of its unit; 0 if it names none."""
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

    def attempt(self, run: Callable[[], Any], name: str, wanted: int) -> Any:
        """run(), and again after an out-of-memory error, at most `ATTEMPTS` times; then BudgetError.

        wanted: bytes that it will allocate, as far as is known.
        """
        if self._ledger.budget_bytes is None:
            return run()
        for attempt in range(ATTEMPTS + 1):
            try:
                return run()
            except BudgetError:
                raise
            except torch.OutOfMemoryError as error:
                asked = requested(str(error))
                if asked > wanted + wanted // 100:  # it is not merely rounded
                    wanted = asked + asked // 100
            # The error is gone, and with it what its traceback held.
            if attempt == ATTEMPTS:
                break
            with self._careful.lock:
                self._release(attempt, wanted)
            self.retries += 1
        if self._ledger.warn_only:
            self.gpu.set_cap(None)
            self.lifted = True
            self._ledger.over_budget += 1
            self._warn(OVER_BUDGET.format(operator=name))
            return run()
        too_small = self._ledger._too_small(wanted, name)
        self._careful._too_small(too_small)
        raise too_small

    def _release(self, attempt: int, wanted: int) -> None:
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
        with below():
            if attempt == 0:
                if not self._make_hole(wanted):
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
