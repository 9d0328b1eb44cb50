"""Limits how far back recipes reach: to the last iteration of the program's outer loop.

What a program carries from one iteration to the next (running averages, hidden states, weights that are
replaced by new tensors, a growing cache) would otherwise be recomputed from the first iteration on. The
versions of every iteration, with all the constants that they read, would be kept for that.
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
        self.former_step_age = 0  # `ledger.step_age` of the step before
        self.former_work = 0  # ns that the last step in full has taken, without recomputation
        self.former_operators = 0  # how many it had

    def end_step(self) -> None:
        """Limit recipes at the end of an optimizer step, which ends a period."""
        ledger = self._ledger
        ledger.collect_dead()
        self._forget_mutated()
        self.cut()
        self._deallocation.free_all_unread_scratch()
        operators = ledger.age + 1 - ledger.step_age
        self.former_step_age, ledger.step_age = ledger.step_age, ledger.age + 1
        is_counted = ledger.operators_counted > 0
        if is_counted:  # these have no costs: take those of the last step in full
            worked = ledger.clock - ledger.recomputed_cost - ledger.step_began
            expected = self.former_work * operators // (self.former_operators or operators)
            ledger.clock += max(expected - worked, 0)
            ledger.operators_counted = 0
        own = ledger.clock - ledger.recomputed_cost
        work, ledger.step_began = own - ledger.step_began, own
        ledger.step_work = max(work, self.former_work)
        if not is_counted:
            self.former_work, self.former_operators = work, operators

    def end_period(self) -> None:
        """Limit recipes at the end of an iteration of the program's outer loop."""
        for observer in self._ledger.observers:
            observer.period(PERIOD_ENDS)
        self.end_step()

    def rescued_since(self, age: int) -> Iterator[Version]:
        """For `core.foresight`: yield what was made since then and lost its recipe, so it had to stay.

        Or it never had a recipe; then it is never evicted, and does not matter here.
        """
        for version in reversed(self._ledger.versions.values()):
            if version.age <= age and version.mutations == 0:
                break
            if version.operation is None:
                yield version

    def compact(self, age: int) -> None:
        """Limit recipes if no iteration has ended for a while. age: older small storages lose theirs."""
        for observer in self._ledger.observers:
            observer.period(COMPACTS, age=age)
        self._forget_small(age)
        self.cut()

    def cut(self) -> None:
        """Make constants of versions that would be recomputed from released storages older than the last cut.

        Evicted ones are brought back first, if there is room, unless there is a copy on the host.
        """
        for version in reversed(self._ledger.carried(self.cut_age)):
            content = version()  # another thread may release it at any moment
            kept = version.resident or version.has_left
            if content is not None and (kept or self._rematerializer.restore(version)):
                self._recipes.make_constant(version, "carried over")
        self.cut_age = self._ledger.age + 1

    def _forget_mutated(self) -> None:
        """At the end of a step, drop recipes that depend on weights that have changed since.

        Otherwise a program that keeps every `loss` would keep the versions of every step. Two networks that
        are trained in turn change different weights in each step, so this covers the previous step, too.
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
