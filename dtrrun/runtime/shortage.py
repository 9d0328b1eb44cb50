"""Evicts when the system refuses memory though the budget has room (`ulimit -d`, `RLIMIT_AS`), on a CPU.

The native extension's heap calls this (`dtrrun/native/shortage.h`), perhaps in the middle of an operator, and
asks the system again. Eviction leaves holes, which may be too small: each attempt evicts more. If all fail,
the program gets PyTorch's own error, as without dtrrun.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.guards import below

if TYPE_CHECKING:
    from dtrrun.runtime.adapting import Adapting

ATTEMPTS = 5  # the last one evicts everything
REFUSED = (
    "the system refuses memory that the budget has room for (is there a ulimit?): evicting more than the "
    "budget requires"
)


class Shortage:
    """Listens to the heap while installed."""

    def __init__(
        self,
        callbacks: Callbacks,
        native: ModuleType,
        warn: Callable[[str], None],
        adapting: Callable[[], Adapting | None],
    ) -> None:
        self._callbacks, self._ledger = callbacks, callbacks.ledger
        self._eviction, self._native, self._warn = callbacks.dtr.eviction, native, warn
        self._adapting = adapting

    def install(self) -> None:
        self._native.on_shortage(self._release)

    def remove(self) -> None:
        self._native.on_shortage(None)

    def _release(self, nbytes: int, attempt: int) -> bool:
        """Evict for a block that was refused. Returns whether that has freed anything."""
        ledger = self._ledger
        if attempt >= ATTEMPTS or ledger.budget_bytes is None or not ledger.evicting:
            return False
        with self._callbacks.lock, (guard := below()), guard:
            ledger.collect_dead()
            before = ledger.resident_bytes
            if attempt == 0 and (adapting := self._adapting()) is not None:
                adapting.refused(before)
            self._eviction.release(before if attempt == ATTEMPTS - 1 else nbytes << attempt)
            freed = ledger.resident_bytes < before
        if freed:
            self._warn(REFUSED)
        return freed
