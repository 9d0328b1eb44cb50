"""The eviction loop (paper, Sec. 2 and App. C.4), and the error raised if it can't free enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns as now_ns
from typing import Any

from dtrrun.core.backend import Shortcuts
from dtrrun.core.deallocation import Deallocation
from dtrrun.core.garbage import Garbage
from dtrrun.core.graph import Version
from dtrrun.core.ledger import Decision, Ledger
from dtrrun.core.locks import Locks
from dtrrun.core.recipes import Recipes


class Eviction:
    """Evicts until there is room. `over_budget`: how often there was none, and the program went on."""

    __slots__ = (
        "__dict__",
        "evicted_bytes_total",
        "evictions",
        "making_room_ns",
        "replaying",
    )  # what the native extension writes

    in_python = False
    """For tests: new sessions evict and rematerialize in Python, never in C++."""

    def __init__(
        self,
        ledger: Ledger,
        recipes: Recipes,
        deallocation: Deallocation,
        *,
        budget_error: type[Any],
        warn_only: bool = False,
        garbage: Garbage,
        shortcuts: Shortcuts | None = None,
    ) -> None:
        """budget_error: called with the operator, the bytes that it needs, the budget, the least sufficient
        budget, and the bytes that can't be evicted, by reason. warn_only: exceed the budget and count it
        instead of raising."""
        self._ledger, self._recipes, self._deallocation = ledger, recipes, deallocation
        self._shortcuts, self.garbage = shortcuts, garbage
        self.BudgetError = budget_error
        self.warn_only = warn_only
        self.replaying = 0  # rematerializations in progress
        self.reach = -1  # on a GPU: what tensors could use without fragmentation
        self.refresh: Callable[[], bool] = lambda: False  # on a GPU: measure it again; is it more now?
        self.evictions = self.evicted_bytes_total = self.over_budget = 0
        self.evicted_by: dict[str, int] = {}
        self.making_room_ns = 0

    def make_room(self, nbytes: int, operator: str) -> None:
        """Evict until `nbytes` more fit into the budget.

        operator: named in the error. Raises the budget error if they can't be made to fit.
        """
        if not self.try_room(nbytes):
            self.no_room(nbytes + self._ledger.reserved_bytes, operator)

    def try_room(self, nbytes: int) -> bool:
        """Evict until `nbytes` more fit into the budget. Returns whether they do."""
        ledger = self._ledger
        if ledger.dead:
            ledger.collect_dead()
        if ledger.reserved:
            nbytes += ledger.reserved_bytes
        if ledger.resident_bytes + nbytes <= ledger.limit:
            return True
        ledger.look_outside()
        return ledger.resident_bytes + nbytes <= ledger.limit or self._evict_to(ledger.limit - nbytes)

    def excess(self, nbytes: int) -> int:
        """Return how far `nbytes` more would go beyond the budget, as things are."""
        ledger = self._ledger
        return ledger.resident_bytes + ledger.reserved_bytes + nbytes - ledger.limit

    def no_room(self, nbytes: int, operator: str) -> None:
        """Everything has been evicted, and `nbytes`, with what is reserved, do not fit.

        Raises the budget error, or counts that it is exceeded.
        """
        ledger = self._ledger
        if self.reach >= 0 and (self._may_fit(nbytes) or (self.refresh() and self._may_fit(nbytes))):
            return  # the limit is an estimate: the allocator decides
        ledger.decided(Decision.REFUSED, nbytes, 0, 0)
        if self.warn_only:
            self.over_budget += 1
            return
        raise self.too_small(nbytes - ledger.reserved_bytes, operator)

    def _may_fit(self, nbytes: int) -> bool:
        return not (self.replaying and self._ledger.resident_bytes + nbytes > self.reach)

    def release(self, nbytes: int) -> bool:
        """Evict `nbytes`. If there are not as many, evict all and return False."""
        return self._evict_to(max(self._ledger.resident_bytes - nbytes, 0))

    def shrink(self, made: Sequence[Version], operator: str) -> None:
        """Evict until the budget holds, sparing `made`: an operator allocated more than predicted.

        Raises the budget error.
        """
        locks = Locks()
        with locks:
            locks.take(made)
            self.make_room(0, operator)

    def _evict_to(self, most: int) -> bool:
        """Evict until at most `most` bytes are resident. Returns False if nothing is left to evict."""
        if (done := self._natively(most)) is not None:
            return done
        ledger = self._ledger
        started = now_ns()
        ledger.begin_pressure()
        if not self.replaying and self.garbage.recomputed_ns() >= self.garbage.due_ns:
            self.garbage.when_due()
        fits = True
        while ledger.resident_bytes > most:
            if self._deallocation.sweep(self.evictions):
                continue
            victim = self._select()
            if victim is not None:
                if self._recipes.secure(victim):  # otherwise it is a constant now, and not in the pool
                    self.evict(victim)
            elif ledger.dead:
                ledger.collect_dead()
            elif not self.collect_garbage():
                fits = False
                break
        self.making_room_ns += now_ns() - started
        return fits

    def _natively(self, most: int) -> bool | None:
        return None if self._shortcuts is None else self._shortcuts.evict_to(most)

    def _select(self) -> Version | None:
        ledger = self._ledger
        if not ledger.decision_observers:
            return ledger.policy.select(ledger.clock, self.may_be_evicted)
        started = now_ns()
        victim: Version | None = ledger.policy.select(ledger.clock, self.may_be_evicted)
        for observer in ledger.decision_observers:
            observer.searched(victim, started)
        return victim

    def may_be_evicted(self, version: Version) -> bool:
        """Return whether a version may be evicted, provided that its recipe can be secured."""
        if version.locks or not version.resident or version.operation is None:
            return False
        if version.scratch is not None:
            # Otherwise, with a budget that can't be kept, one rematerialization could take exponential time.
            return not (self.warn_only and self.replaying)
        return version.has_storage  # otherwise it has just died, and `collect_dead` accounts for it

    def evict_if_possible(self, version: Version) -> bool:
        """Evict this version, whatever its score. Returns whether that was possible."""
        if not (self.may_be_evicted(version) and self._recipes.secure(version)):
            return False
        self.evict(version)
        return True

    def collect_garbage(self) -> bool:
        """Nothing is left to evict. Returns whether a garbage collection has freed memory."""
        # Otherwise something else is tried first, or the program goes on.
        certain = not (self.replaying or self.warn_only or self.reach >= 0)
        return self.garbage.without_room(certain=certain)

    def evict(self, version: Version) -> None:
        """Free the memory of a version whose recipe is secured (App. C.4)."""
        ledger, operation = self._ledger, version.operation
        assert operation is not None
        storage: Any = version()
        if storage is None and version.scratch is None:
            return  # it has died since it was chosen
        started = now_ns() if ledger.decision_observers else 0
        self.evictions += 1
        self.evicted_bytes_total += version.nbytes
        name = operation.signature.operator.name
        self.evicted_by[name] = self.evicted_by.get(name, 0) + 1
        if version.scratch is not None:
            ledger.drop_scratch(version)
            ledger.policy.released(version)
        else:
            self._deallocation.keep_inputs(version)
            if ledger.fingerprints is not None:
                version.fingerprint = ledger.fingerprints.of(version)
            ledger.emptied(version)
            try:
                ledger.memory.empty(storage)
            except BaseException:  # an interrupt, before or after emptying
                ledger.memory.empty(storage)
                raise
            ledger.policy.evicted(version)
        ledger.freed(version.nbytes)
        for observer in ledger.decision_observers:
            observer.evicted(version, started)

    # -- what the error says -----------------------------------------------------------------------

    def pinned_by_reason(self) -> dict[str, int]:
        """Return the resident bytes that can't be evicted now, by reason, largest first."""
        ledger = self._ledger
        pinned: dict[str, int] = {}
        for version in (*ledger.versions.values(), *ledger.scratch.values()):
            if version.resident and (version.locks or version.operation is None):
                reason = "in use by the operator" if version.locks else version.pin or "constant"
                pinned[reason] = pinned.get(reason, 0) + version.nbytes
        for block in ledger.pinned_blocks():
            pinned[block.pin] = pinned.get(block.pin, 0) + block.nbytes
        return dict(sorted(pinned.items(), key=lambda item: -item[1]))

    def least_bytes_with(self, versions: Sequence[Version]) -> int:
        """Return the bytes of these versions and of all that can never be evicted. Locks don't count."""
        ledger = self._ledger
        constants = (one for one in ledger.versions.values() if one.resident and one.operation is None)
        wanted = {id(one): one.nbytes for one in (*constants, *versions)}
        blocks = sum(block.nbytes for block in ledger.pinned_blocks())
        return sum(wanted.values()) + blocks + sum(ledger.overhead.values())

    def too_small(self, nbytes: int, operator: str, *, refused: bool = False) -> Exception:
        """Return the error for an operator that needs `nbytes` more than are available.

        refused: by the device's allocator, with all evicted, whatever room the ledger sees.
        """
        ledger = self._ledger
        assert ledger.budget_bytes is not None
        overhead = max(ledger.budget_bytes - ledger.limit, sum(ledger.overhead.values()), 0)  # on a GPU
        reserved = ledger.reserved_bytes
        under_way = {"results of running operators": reserved} if reserved else {}
        least = ledger.resident_bytes + reserved + nbytes + overhead
        error: Exception = self.BudgetError(
            operator,
            nbytes,
            ledger.budget_bytes,
            max(least, ledger.budget_bytes + nbytes) if refused else least,
            self.pinned_by_reason() | ledger.overhead | under_way,
        )
        return error
