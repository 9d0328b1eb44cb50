"""Rematerialization: the requests. How, and in which order, it is done is in `core/rematerialize.h`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from dtrrun.core import bound
from dtrrun.core.backend import Executor
from dtrrun.core.eviction import Eviction
from dtrrun.core.foreign import AWAY, LOST, WHY_AWAY, WHY_GIVEN_UP, LostError
from dtrrun.core.graph import Version
from dtrrun.core.ledger import GIVEN_UP, Ledger
from dtrrun.core.locks import unlock
from dtrrun.core.observer import RESTORES
from dtrrun.core.recipes import Recipes


class Rematerializer(bound.Rematerializer):
    """Brings evicted versions back, and counts the cost."""

    def __init__(
        self,
        ledger: Ledger,
        recipes: Recipes,
        eviction: Eviction,
        executor: Executor,
        *,
        out_of_memory: type[Exception],
    ) -> None:
        """out_of_memory: the errors that a rematerialization may raise, including the budget error."""
        super().__init__(ledger)
        self._ledger, self._foreign = ledger, recipes.foreign
        self._eviction, self._executor = eviction, executor
        self._out_of_memory = out_of_memory

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
        adapting, self._eviction.adapting = self._eviction.adapting, None  # not worth a larger budget
        try:
            self.materialize((version,), locked=False)
        except (self._out_of_memory, AssertionError, LostError):
            return False
        finally:
            self._eviction.adapting = adapting
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
                with ledger.on(version.device):
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

    @staticmethod
    def refuse(version: Version) -> NoReturn:
        """Raise LostError for an evicted version without a recipe; AssertionError for an internal error."""
        if version.pin == LOST:
            raise LostError
        if version.pin == AWAY:
            raise LostError(WHY_AWAY)
        if version.pin == GIVEN_UP:
            raise LostError(WHY_GIVEN_UP)
        raise AssertionError("dtrrun: internal error: an evicted storage cannot be recomputed")

    def check_unchanged(self, version: Version) -> None:
        """Raise LostError unless a version is as it was when its dependents were computed.

        It has escaped, or is away.
        """
        if version.away:
            raise LostError(WHY_AWAY)
        if not self._foreign.unchanged(version):
            raise LostError
