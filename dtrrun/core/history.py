"""Limits how far back recipes reach: to the last turn of the program's outer loop.

What a program carries from one turn to the next (running averages, hidden states, weights that are replaced
by new tensors, a growing cache) would otherwise be recomputed from the first turn on. The versions of every
turn, with all the constants that they read, would be kept for that.
"""

from __future__ import annotations

from collections.abc import Iterator

from dtrrun.core.deallocation import Deallocation
from dtrrun.core.graph import Version
from dtrrun.core.ledger import INPUT_MUTATED, Ledger
from dtrrun.core.observer import COMPACTS, PERIOD_ENDS
from dtrrun.core.recipes import Recipes
from dtrrun.core.rematerialize import Rematerializer

SMALL = 4096  # bytes


class History:
    """Drops recipes that have become too long, or whose inputs have changed."""

    def __init__(
        self,
        ledger: Ledger,
        recipes: Recipes,
        deallocation: Deallocation,
        rematerializer: Rematerializer,
    ) -> None:
        self._ledger, self._recipes, self._rematerializer = ledger, recipes, rematerializer
        self._deallocation = deallocation
        self.cut_age = 0  # the ledger's age when the last cut was made
        self.former_step_age = 0  # its age at the end of the step before the last one

    def end_step(self) -> None:
        """An optimizer step has ended, which ends a period."""
        ledger = self._ledger
        ledger.collect_dead()
        self._forget_mutated()
        self.cut()
        self._deallocation.free_all_unread_scratch()
        self.former_step_age, ledger.step_age = ledger.step_age, ledger.age + 1

    def end_period(self) -> None:
        """A turn of the program's outer loop has ended."""
        for observer in self._ledger.observers:
            observer.period(PERIOD_ENDS)
        self.end_step()

    def rescued_since(self, age: int) -> Iterator[Version]:
        """For `core.foresight`: yield what was made since then, and has no recipe any more: it had to stay.

        Or it never had one; then it is never evicted, and it does not matter.
        """
        for version in reversed(self._ledger.versions.values()):
            if version.age <= age and version.mutations == 0:
                break
            if version.operation is None:
                yield version

    def compact(self, age: int) -> None:
        """No turn has ended for a while. age: small storages older than this lose their recipes."""
        for observer in self._ledger.observers:
            observer.period(COMPACTS, age=age)
        self._forget_small(age)
        self.cut()

    def cut(self) -> None:
        """Make constants of versions that would be recomputed from released storages older than the last cut.

        Evicted ones are brought back if there is room.
        """
        for version in reversed(self._ledger.carried(self.cut_age)):
            content = version()  # another thread may release it at any moment
            if content is not None and (version.resident or self._rematerializer.restore(version)):
                self._recipes.make_constant(version, "carried over")
        self.cut_age = self._ledger.age + 1

    def _forget_mutated(self) -> None:
        """At the end of a step, drop recipes that depend on weights that have changed since.

        Otherwise a program that keeps every `loss` would keep the versions of every step. Two networks that
        are trained in turn change other weights in each step, so this looks at the step before, too.
        """
        trusted = self._recipes.foreign.trusted()
        for version in self._ledger.mutated(self.former_step_age, trusted):
            if version.has_storage:  # another thread may release it at any moment
                self._recipes.make_constant(version, INPUT_MUTATED)

    def _forget_small(self, age: int) -> None:
        """Drop the recipes of small, long-lived storages (predictions, losses), which would accumulate.

        age: younger ones keep their recipes.
        """
        for version in list(self._ledger.versions.values()):
            if version.age >= age:
                break
            operation = version.operation
            small = version.nbytes <= SMALL and operation is not None and not operation.secured
            content = version()
            if small and content is not None and version.resident and not version.locks:
                self._recipes.make_constant(version, "small and old")
