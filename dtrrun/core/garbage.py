"""Runs Python's garbage collector to free tensors that only reference cycles still hold.

Until they are collected they take a part of the budget: others are evicted instead, an optimizer step brings
back those of them that were evicted, and in the end the program is refused memory that it would have without
them. But a collection visits every object in the process, which takes a tenth of a second once torch has been
imported, and most programs have no such garbage. So one runs

- before the program is refused memory;
- before what was computed from a weight is brought back because the weight changes;
- once more time has gone into recomputing than a few collections would take.

The last two become ever rarer as long as collections free nothing, and so do those before a failure that the
program does not notice. A program may be refused memory at every step, and go on with less: once `TRIES`
collections in a row have freed nothing, a refusal is preceded by one that visits only the objects made since
the last, which takes a millisecond, and by a full one at most in one `REST`th of the time.

A program that has disabled the collector chooses itself when its finalizers run: it gets no collection, and
the error says so.

Where costs are modelled, decisions must not depend on measured times: time is then the ledger's clock, and a
collection counts as `MODELLED_NS`. None runs for the last reason, and none for the second after one that
freed nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter_ns as now_ns
from typing import Any

from dtrrun.core.ledger import Ledger

NEVER = 1 << 62
FIRST_NS = 400_000_000  # of recomputing, before the first collection for that reason
PATIENCE = 4  # recomputing time before the next one, as a multiple of the time that the last one took
REST = 16  # elapsed time after a fruitless one, as such a multiple, unless memory would be refused,
SHORT_REST = 4  # and after one that freed something
LARGE_SHIFT = 3  # of the limit: before this much is brought back, SHORT_REST does not apply
LEAST_SHIFT = 6  # of the limit: a collection that frees no more than this is fruitless
MODELLED_NS = 100_000_000
TRIES = 3  # fruitless full collections in a row, before a refusal waits as long as others do
YOUNG = 1  # the generation of objects that few collections have visited
BACKOFF = 10  # the wait is doubled at most so many times


class Garbage:
    """Runs collections, and decides whether one is worth its time."""

    def __init__(
        self,
        ledger: Ledger,
        collect: Callable[..., Any] | None,
        *,
        modelled: bool = False,
    ) -> None:
        """collect: like `gc.collect`; None if there is nothing to collect. modelled: measured times have no
        effect."""
        self._ledger, self._collect = ledger, collect
        self._modelled = modelled
        ledger.collection_due_ns = NEVER if collect is None or modelled else FIRST_NS
        self._fruitless = 0  # collections since the last one that was not fruitless
        self._took_ns = 0
        self._ended_ns = 0  # when the last one ended
        self._last_ns = 0  # the same, on the clock that decides about the next
        self.hopeless = False  # whether what was asked for last would not fit into empty memory
        self._age = -1  # the ledger's age at that moment

    def when_due(self) -> None:
        """Collect before room is made, since recomputing has reached `Ledger.collection_due_ns`.

        Not in a program that has disabled the collector, and so chooses when to collect.
        """
        if gc.isenabled():
            self._run()
        else:
            self._ledger.collection_due_ns = self._ledger.recomputed_ns + FIRST_NS

    def before_rescue(self, nbytes: int) -> bool:
        """Collect, if worthwhile, before `nbytes` that are evicted are brought back to stay.

        Returns whether that was done.
        """
        if self._collect is None or not gc.isenabled() or self._age == self._ledger.age:
            return False
        if self._fruitless:
            if self._ledger.recomputed_ns < self._ledger.collection_due_ns:
                return False
        elif nbytes < self._ledger.limit >> LARGE_SHIFT and self._since() < SHORT_REST * self._took_ns:
            return False
        self._run()
        return True

    def without_room(self, *, certain: bool) -> bool:
        """Collect if worthwhile, as nothing is left to evict. Returns whether that has freed memory.

        certain: whether the program is refused memory otherwise.
        """
        if self._collect is None or not gc.isenabled():
            return False
        if certain:
            return self._before_refusing()[0] > 0
        idle = self._age == self._ledger.age or self._is_early()
        if self._fruitless and idle:
            return False
        return self._run()[0] > 0

    def before_refusing(self, since_ns: int) -> bool:
        """Collect before the program is refused what it asked for at `since_ns`.

        Returns whether to try once more, because a collection has found something.
        """
        if self._collect is None or not gc.isenabled() or self._ended_ns > since_ns:
            return False
        freed, dropped = self._before_refusing()
        return freed > 0 or dropped > 0

    def _before_refusing(self) -> tuple[int, int]:
        if self.hopeless:
            return 0, 0
        if self._fruitless < TRIES or not self._is_early():
            return self._run()
        # Which objects are young depends on more than the program: not where every run has to decide alike.
        return (0, 0) if self._modelled else self._freed_by(YOUNG)

    def _is_early(self) -> bool:
        return self._since() < REST * self._took_ns

    def _since(self) -> int:
        return (self._ledger.clock if self._modelled else now_ns()) - self._last_ns

    def _run(self) -> tuple[int, int]:
        """Collect. Returns the bytes freed, and those of evicted storages that have died."""
        ledger = self._ledger
        started = now_ns()
        freed, dropped = self._freed_by()
        worth = max(freed, 0) + max(dropped, 0)
        self._fruitless = 0 if worth > ledger.limit >> LEAST_SHIFT else min(self._fruitless + 1, BACKOFF)
        self._took_ns = MODELLED_NS if self._modelled else self._ended_ns - started
        self._last_ns = ledger.clock if self._modelled else self._ended_ns
        self._age = ledger.age
        if not self._modelled:
            self._ledger.collection_due_ns = self._ledger.recomputed_ns + max(
                FIRST_NS, PATIENCE * self._took_ns << self._fruitless
            )
        return freed, dropped

    def _freed_by(self, *generation: int) -> tuple[int, int]:
        assert self._collect is not None
        ledger = self._ledger
        ledger.collect_dead()
        resident, evicted = ledger.resident_bytes, ledger.evicted_bytes
        self._collect(*generation)
        self._ended_ns = now_ns()
        ledger.collect_dead()
        return resident - ledger.resident_bytes, evicted - ledger.evicted_bytes
