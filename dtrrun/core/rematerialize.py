"""Rematerialization: the requests. How, and in which order, it is done is in `core/rematerialize.h`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from dtrrun.core.backend import Executor
from dtrrun.core.deallocation import Deallocation
from dtrrun.core.eviction import Eviction
from dtrrun.core.foreign import LOST, LostError
from dtrrun.core.frugal import bring_back, fit_one_by_one
from dtrrun.core.graph import Operation, Version
from dtrrun.core.ledger import Ledger
from dtrrun.core.locks import unlock
from dtrrun.core.observer import RESTORES
from dtrrun.core.recipes import Recipes


class Materialize(Protocol):
    def __call__(self, targets: Sequence[Version], *, locked: bool = True) -> None:
        """Make all targets resident. locked: whether the caller has locked them.

        Raises the budget error. Locks taken here are released.
        """


class Rematerializer:
    """Brings evicted versions back, and counts the cost."""

    rematerializations: int
    rematerialized_bytes: int
    operators_ns: int  # time in recomputed operators only
    by_operator: dict[str, list[int]]  # name: [count, ns, bytes]
    materialize: Materialize
    needs: Callable[[Operation], int]
    """Return the bytes needed to run an operation whose inputs are locked, without a workspace."""
    run_with_room: Callable[[Version, Operation], bool]
    """Run an operation whose inputs are locked; if there is too little room, without a workspace.

    Also takes a version that it makes. Returns False if an input has gone. Raises the budget error.
    """
    idle: Callable[[Version], None]
    """Note that a version was unlocked before the operation that it was locked for has run."""
    read: Callable[[Version, Operation], None]
    """Note that an operation that has read a version is over. Frees what was recomputed for it alone."""
    under_way_ns: Callable[[], int]
    """Return the bookkeeping time of the current rematerialization, which is counted only at its end."""

    def __init__(
        self,
        ledger: Ledger,
        recipes: Recipes,
        deallocation: Deallocation,
        eviction: Eviction,
        executor: Executor,
        *,
        out_of_memory: type[Exception],
    ) -> None:
        """out_of_memory: the errors that a rematerialization may raise, including the budget error."""
        self._ledger, self._foreign = ledger, recipes.foreign
        self._deallocation, self._eviction, self._executor = deallocation, eviction, executor
        self._out_of_memory = out_of_memory
        self.at_once = False  # go to `frugally` as soon as there is no room, since it was needed before

    def lock(self, versions: Sequence[Version], taken: list[Version] | None = None) -> None:
        """Lock versions and bring back those that are evicted. On failure nothing stays locked.

        taken: receives the versions locked so far, for the caller to unlock. Raises the budget error.
        """
        clock = self._ledger.clock
        if taken is None:
            taken = []
        resident = True
        try:
            for version in versions:
                version.locks += 1
                taken.append(version)
                version.last_access = clock
                resident = resident and version.resident
            if not resident:
                self.materialize(versions)
        except BaseException:
            unlock(taken)
            raise

    def restore(self, version: Version) -> bool:
        """Bring an evicted version back if there is room. Returns whether there was."""
        try:
            self.materialize((version,), locked=False)
        except (self._out_of_memory, AssertionError, LostError):
            return False
        return True

    def restore_all(self, *, fitting: bool = False) -> list[Version]:
        """Bring back everything that the program still has. Returns what could not be brought back.

        fitting: stop once that evicts something else.
        """
        ledger, before = self._ledger, self._eviction.evictions
        for observer in ledger.observers:
            observer.period(RESTORES, fitting=fitting)
        lost = []
        for version in list(ledger.versions.values()):
            if version.alive and not version.resident:
                room = ledger.resident_bytes + version.nbytes <= ledger.limit
                fits = room and self._eviction.evictions == before
                if not ((fits or not fitting) and self.restore(version)):
                    lost.append(version)
        return lost

    # -- for C++ ---------------------------------------------------------------------------------

    def beneath(self, function: Callable[[], None]) -> None:
        """Call `function` with its operators hidden from the program, and their warnings suppressed."""
        self._executor.quietly(self._beneath, function)

    def _beneath(self, function: Callable[[], None]) -> None:
        guard = self._executor.below()
        with guard, guard:  # twice, because of interrupts
            function()

    def frugally(self, targets: Sequence[Version], locked: bool) -> bool:
        """Bring back what did not fit, in as little memory as possible. Returns whether that was possible."""
        done: bool = self._executor.quietly(self._frugally, targets, locked)
        return done

    def _frugally(self, targets: Sequence[Version], locked: bool) -> bool:
        eviction = self._eviction
        eviction.replaying += 1
        try:
            guard = self._executor.below()
            with guard, guard:  # twice, because of interrupts
                done = bring_back(self._ledger, self._deallocation, eviction, self, targets, locked=locked)
                self.at_once = self.at_once or done
                return done
        finally:
            eviction.replaying -= 1
            if not eviction.replaying:
                self._deallocation.release_kept_inputs()

    def ends_at_once(self, targets: Sequence[Version]) -> bool:
        """Return whether not to retry a rematerialization that found no room in the same way.

        True if it can't succeed in any way, or if an earlier one needed `frugally`.
        """
        return self.at_once or not fit_one_by_one(self._ledger, targets)

    @staticmethod
    def refuse(version: Version) -> NoReturn:
        """Raise LostError for an evicted version without a recipe; AssertionError for an internal error."""
        if version.pin == LOST:
            raise LostError
        raise AssertionError("dtrrun: internal error: an evicted storage cannot be recomputed")

    def check_unchanged(self, version: Version) -> None:
        """Raise LostError unless an escaped version is as it was when its dependents were computed."""
        if not self._foreign.unchanged(version):
            raise LostError
