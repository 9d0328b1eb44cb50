"""Asks Python's garbage collector for tensors that only cycles of references still hold.

Until it finds them they take a part of the budget: others are evicted in their place, an optimizer's step
brings back those that were evicted, and at last the program is refused memory that it would have without
them. A collection looks at every object of the process, though, a tenth of a second once torch has been
imported, and most programs have no such garbage. So one is made

- before the program is refused memory, always;
- before what was computed from a weight is brought back because the weight changes;
- once more time has gone into recomputing than a few collections would take.

The last two become ever rarer as long as collections free nothing, and so do those before an attempt fails of
which the program does not learn.

Where costs are modelled, decisions must not depend on measured times: time is that of the ledger's clock, and
a collection counts as `MODELLED_NS`. None is made for the last reason, and none for the second after one in
vain.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter_ns as now_ns
from typing import Any

from dtrrun.core.ledger import Ledger

NEVER = 1 << 62
FIRST_NS = 400_000_000  # of recomputing, before the first collection for that reason
PATIENCE = 4  # what is recomputed before the next one, as a multiple of the time that the last one took
REST = 16  # the same in time, where a collection that frees nothing leaves the program as it is,
SHORT_REST = 4  # and between two that free something
LARGE_SHIFT = 3  # of the limit: what is brought back only after a collection in any case
LEAST_SHIFT = 6  # of the limit: what has to be freed for the next one to come as soon
MODELLED_NS = 100_000_000
BACKOFF = 10  # most times that the wait is doubled


class Garbage:
    """Makes collections, and decides whether one is worth its time."""

    def __init__(
        self,
        ledger: Ledger,
        collect: Callable[[], Any] | None,
        *,
        modelled: bool = False,
    ) -> None:
        """collect: makes a collection; None if there is nothing to collect. modelled: measured times have no
        effect."""
        self._ledger, self._collect = ledger, collect
        self._modelled = modelled
        ledger.collection_due_ns = NEVER if collect is None or modelled else FIRST_NS
        self.collections = 0
        self._fruitless = 0  # collections since the last one that freed something of weight
        self._took_ns = 0
        self._ended_ns = 0  # when the last one ended,
        self._last_ns = 0  # and the same on the clock that is used for the next
        self._age = -1  # the ledger's at that moment

    def when_due(self) -> None:
        """Room is about to be made, and `Ledger.collection_due_ns` has been recomputed: collect.

        Not in a program that has switched the collector off: it chooses its own moments.
        """
        if gc.isenabled():
            self._run()
        else:
            self._ledger.collection_due_ns = self._ledger.recomputed_ns + FIRST_NS

    def before_rescue(self, nbytes: int) -> bool:
        """`nbytes` that are evicted are about to be brought back, to stay: collect.

        Returns whether that was done.
        """
        if self._collect is None or self._age == self._ledger.age:
            return False
        if self._fruitless:
            if self._ledger.recomputed_ns < self._ledger.collection_due_ns:
                return False
        elif nbytes < self._ledger.limit >> LARGE_SHIFT and self._since() < SHORT_REST * self._took_ns:
            return False
        self._run()
        return True

    def without_room(self, *, certain: bool) -> bool:
        """Nothing is left to evict. Returns whether a collection has freed memory.

        certain: whether the program is refused memory if not.
        """
        if self._collect is None:
            return False
        idle = self._age == self._ledger.age or self._since() < REST * self._took_ns
        if self._fruitless and idle and not certain:
            return False
        freed, _ = self._run()
        return freed > 0

    def before_refusing(self, since_ns: int) -> bool:
        """The program is about to be refused what it asked for at `since_ns`.

        Returns whether it may be tried once more, because a collection has found something.
        """
        if self._collect is None or self._ended_ns > since_ns:
            return False
        freed, dropped = self._run()
        return freed > 0 or dropped > 0

    def _since(self) -> int:
        return (self._ledger.clock if self._modelled else now_ns()) - self._last_ns

    def _run(self) -> tuple[int, int]:
        """Collect. Returns the bytes freed, and those of evicted storages that have died."""
        assert self._collect is not None
        ledger = self._ledger
        ledger.collect_dead()
        resident, evicted = ledger.resident_bytes, ledger.evicted_bytes
        started = now_ns()
        self._collect()
        self._ended_ns = now_ns()
        ledger.collect_dead()
        freed, dropped = resident - ledger.resident_bytes, evicted - ledger.evicted_bytes
        worth = max(freed, 0) + max(dropped, 0)
        self._fruitless = 0 if worth > ledger.limit >> LEAST_SHIFT else min(self._fruitless + 1, BACKOFF)
        self._took_ns = MODELLED_NS if self._modelled else self._ended_ns - started
        self._last_ns = ledger.clock if self._modelled else self._ended_ns
        self._age = ledger.age
        if not self._modelled:
            self._ledger.collection_due_ns = self._ledger.recomputed_ns + max(
                FIRST_NS, PATIENCE * self._took_ns << self._fruitless
            )
        self.collections += 1
        return freed, dropped
