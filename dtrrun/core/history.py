"""Limits how far back recipes reach: to the last turn of the program's outer loop.

What a program carries from one turn to the next (running averages, hidden states, weights that are replaced
by new tensors, a growing cache) would otherwise be recomputed from the first turn on. The versions of every
turn, with all the constants that they read, would be kept for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dtrrun.core.backend import Shortcuts
from dtrrun.core.deallocation import Deallocation
from dtrrun.core.evict import Eviction
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
        eviction: Eviction,
        rematerializer: Rematerializer,
        shortcuts: Shortcuts | None = None,
    ) -> None:
        self._ledger, self._recipes, self._rematerializer = ledger, recipes, rematerializer
        self._deallocation, self._eviction = deallocation, eviction
        self._shortcuts = shortcuts
        self.cut_age = 0  # the ledger's age when the last cut was made
        self.former_step_age = 0  # its age at the end of the step before the last one

    def end_step(self) -> None:
        """An optimizer step has ended, which ends a period."""
        ledger = self._ledger
        ledger.collect_dead()
        self._forget_mutated()
        self.cut()
        self._deallocation.sweep_all(self._eviction.evictions)
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
        carried = None if self._shortcuts is None else self._shortcuts.carried(self.cut_age)
        for version in reversed(self._carried() if carried is None else carried):
            content = version()  # another thread may release it at any moment
            if content is not None and (version.resident or self._rematerializer.restore(version)):
                self._recipes.make_constant(version, "carried over")
        self.cut_age = self._ledger.age + 1

    def _carried(self) -> list[Version]:
        """Return those versions, the youngest first."""
        known: dict[int, bool] = {}  # by ids of what exists until all are found
        carried: list[Version] = []
        for version in reversed(list(self._ledger.versions.values())):
            if version.age < self.cut_age and version.mutations == 0:
                break  # older ones come next
            if version.operation is not None and not version.locks and self._reaches_back(version, known):
                carried.append(version)
        return carried

    def _reaches_back(self, version: Version, known: dict[int, bool]) -> bool:
        """Return whether a recipe needs storages from before `cut_age` that the program has released.

        The search ends at storages that the program still has: those are judged separately.
        """

        def rule(node: Version) -> bool | list[Version]:
            if node.operation is None:
                return False
            if node is not version and node.age < self.cut_age:
                return True
            return [source for source in node.operation.inputs if not source.alive]

        return _found(version, known, rule, decisive=True)

    def _forget_mutated(self) -> None:
        """At the end of a step, drop recipes that depend on weights that have changed since.

        Otherwise a program that keeps every `loss` would keep the versions of every step. Two networks that
        are trained in turn change other weights in each step, so this looks at the step before, too.
        """
        mutated = None
        if self._shortcuts is not None:
            mutated = self._shortcuts.mutated(self.former_step_age, self._recipes.foreign.trusted())
        for version in self._mutated() if mutated is None else mutated:
            if version.has_storage:  # another thread may release it at any moment
                self._recipes.make_constant(version, INPUT_MUTATED)

    def _mutated(self) -> list[Version]:
        """Return versions in memory whose recipes have lost an input, the youngest first."""
        intact: dict[int, bool] = {}  # by ids of what exists until all are found
        mutated: list[Version] = []
        for version in reversed(list(self._ledger.versions.values())):
            if version.age < self.former_step_age and version.mutations == 0:
                break  # older than these steps
            there = version.has_storage and version.operation is not None and version.resident
            if there and not self._is_intact(version, intact):
                mutated.append(version)
        return mutated

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

    def _is_intact(self, version: Version, intact: dict[int, bool]) -> bool:
        """Return whether `version` could be recomputed now.

        Like `Recipes.secure`, but keeps nothing alive.
        """

        def rule(node: Version) -> bool | list[Version]:
            if node.operation is None:
                escaped = node.escaped and not self._recipes.foreign.trusts(node)
                return node.resident and not escaped and node.memory() is not None
            return node.operation.secured or list(node.operation.inputs)

        return _found(version, intact, rule, decisive=False)


def _found(
    version: Version,
    known: dict[int, bool],
    rule: Callable[[Version], bool | list[Version]],
    decisive: bool,
) -> bool:
    """Evaluate `rule` for a version.

    Its result may be a list of versions: then it is `decisive` if it is that for any of these. The search
    ends there: after a step the loss may have come from thousands of operators, and one changed weight is
    enough. known: results so far, by id.
    """
    stack = [version]  # an explicit one
    opened: list[Version] = []  # those on the stack from which all that comes after them was reached
    while stack:
        node = stack[-1]
        if id(node) not in known:
            answer = rule(node)
            if isinstance(answer, list):
                unknown = [source for source in answer if id(source) not in known]
                if any(known.get(id(source)) is decisive for source in answer):
                    answer = decisive
                elif unknown:
                    opened.append(node)
                    stack.extend(unknown)
                    continue
                else:
                    answer = not decisive
            known[id(node)] = answer
            if answer is decisive:
                for one in opened:
                    known[id(one)] = decisive
                break
        stack.pop()
        if opened and opened[-1] is node:
            opened.pop()
    return known[id(version)]
