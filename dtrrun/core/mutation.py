"""Mutation (paper, Sec. 3.2 and App. C.6): what happens to recipes when a storage is written to.

The write may come from an operator, or from code that is not one. See `core/mutation.h`.
"""

from __future__ import annotations

from dtrrun.core import bound
from dtrrun.core.foreign import LostError
from dtrrun.core.graph import Version
from dtrrun.core.ledger import Ledger
from dtrrun.core.locks import Locks
from dtrrun.core.recipes import Recipes
from dtrrun.core.rematerialize import Rematerializer

OPERATOR_CHANGED = "made by an operator that has changed"


class Mutation(bound.Mutation):
    """Decides which mutations get a recipe, and rescues versions that the others would make unrecoverable."""

    LostError = LostError

    def __init__(self, ledger: Ledger, recipes: Recipes, rematerializer: Rematerializer) -> None:
        super().__init__(ledger)
        self._ledger, self._recipes, self._rematerializer = ledger, recipes, rematerializer

    # -- operators that change ---------------------------------------------------------------------

    def operators_change(self, names: set[str]) -> None:
        """Rescue what operators with these names have made, before their kernels are replaced or removed.

        What is evicted is brought back, and what is in memory stays. Raises the budget error.
        """
        while True:
            made = self._made_by(names)
            for node in made:
                if node.resident and node.scratch is None and node.memory() is not None:
                    self._recipes.make_constant(node, OPERATOR_CHANGED)
            evicted = [node for node in made if node.alive and not node.resident]
            if not evicted:
                break
            with Locks() as locks:
                locks.take(evicted)
                for node in evicted:
                    try:
                        self._rematerializer.materialize((node,))
                    except LostError:
                        self._recipes.lose(node)
            # That may have evicted another one to make room: look again.
        for node in made:
            if node.operation is not None:  # the program has released or overwritten it
                self.rescue_dependents(node)
                self._recipes.lose(node)

    def _made_by(self, names: set[str]) -> list[Version]:
        """Return what operators with these names have made, including what only recipes refer to."""
        self._ledger.collect_dead()
        found: list[Version] = []
        seen: set[int] = set()
        stack: list[Version] = list(self._ledger.versions.values())
        while stack:
            node = stack.pop()
            if id(node) in seen or node.operation is None:
                continue
            seen.add(id(node))
            stack += node.operation.inputs
            if node.operation.signature.operator.name in names:
                found.append(node)
        return found
