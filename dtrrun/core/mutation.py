"""Mutation (paper, Sec. 3.2 and App. C.6): what happens to recipes when a storage is written to.

The write may come from an operator, or from code that is not one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from dtrrun.core.copies import Copies
from dtrrun.core.foreign import LostError
from dtrrun.core.garbage import Garbage
from dtrrun.core.graph import Version
from dtrrun.core.ledger import INPUT_MUTATED, Ledger
from dtrrun.core.locks import Locks
from dtrrun.core.observer import ESCAPES, WRITTEN_OUTSIDE
from dtrrun.core.recipes import Recipes
from dtrrun.core.rematerialize import Rematerializer

CHAIN_LIMIT = 32  # mutations that a recipe may replay; then the storage becomes a constant

OPERATOR_CHANGED = "made by an operator that has changed"

STICKY = ("parameter", "gradient", "pinned", "loaded or copied", "foreign memory")
"""Pins that remain when the whole storage is overwritten."""


class Writes(Protocol):
    """How an operator writes to versions. place: index of the version among those written."""

    def is_leaf(self, place: int) -> bool:
        """Return whether it is a leaf of autograd."""

    def overwrites(self, place: int) -> bool:
        """Return whether all of the storage is overwritten without being read."""


class Mutation:
    """Decides which mutations get a recipe, and rescues versions that the others would make unrecoverable."""

    def __init__(
        self,
        ledger: Ledger,
        recipes: Recipes,
        rematerializer: Rematerializer,
        garbage: Garbage,
        copies: Copies,
    ) -> None:
        self._ledger, self._recipes, self._rematerializer = ledger, recipes, rematerializer
        self._foreign, self._garbage, self._copies = recipes.foreign, garbage, copies

    # -- by operators ----------------------------------------------------------------------------

    def prepare_writes(
        self, targets: list[Version], writes: Writes, changing: list[Version], *, recordable: bool
    ) -> bool:
        """Prepare for an operator that writes to `targets`.

        Returns whether it gets a recipe, for all of them; if not, what depends on their content is rescued.

        recordable: whether it can be replayed. changing: see `about_to_change`. Raises the budget error.
        """
        for place, version in enumerate(targets):
            if writes.is_leaf(place):
                self._recipes.pin(version, "parameter")
                recordable = False
            elif version.operation is None:
                recordable = recordable and version.pin not in STICKY and writes.overwrites(place)
            elif version.age < self._ledger.step_age or version.mutations >= CHAIN_LIMIT:
                # State that persists over steps (running averages): its history is not worth keeping.
                recordable = False
        if not recordable:
            for version in targets:
                self._recipes.make_constant(version, "updated in place")
        self.about_to_change([version for version in targets if version.operation is None], changing)
        return recordable

    def about_to_change(self, constants: list[Version], changing: list[Version]) -> None:
        """Rescue what depends on constants that an operator is about to write to.

        Some are copied for it. The others are added to `changing`: until the write is done, nothing else may
        come to depend on them. Raises the budget error.
        """
        constants = [version for version in constants if not self._copies.keep(version)]
        for version in constants:
            if not version.escaped:
                version.escaped = True
                changing.append(version)
            else:
                self._foreign.about_to_change(version)
        for version in constants:
            self.rescue_dependents(version)

    # -- by other code ---------------------------------------------------------------------------

    def escape(self, version: Version, why: str) -> None:
        """Other code can reach the memory from now on: it stays, and nothing is recomputed from it.

        Raises the budget error.
        """
        for observer in self._ledger.observers:
            observer.changes(ESCAPES, version, why=why)
        if not version.escaped or self._foreign.trusts(version):
            self._constant_about_to_change(version, why)
            version.escaped = True
            version.pin = why
        self._foreign.give_up(version)

    def escape_together(self, versions: Sequence[Version], why: str) -> None:
        """Let several resident versions escape. Raises the budget error.

        All are locked meanwhile: to bring back what was computed from one may take the place of another.
        """
        with Locks() as locks:
            locks.take(versions)
            for version in versions:
                self.escape(version, why)

    def written_outside(self, version: Version, why: str, *, escapes: bool) -> None:
        """Code that is not an operator is about to write to the memory. escapes: it may also do so later.

        Raises the budget error.
        """
        for observer in self._ledger.observers:
            observer.changes(WRITTEN_OUTSIDE, version, why=why, exposes=escapes)
        if version.operation is not None or not self._copies.keep(version):
            self._constant_about_to_change(version, why)
        version.escaped = version.escaped or escapes  # inherited by later versions
        if escapes:
            self._foreign.give_up(version)
        version.pin = version.pin or why
        if version.used:
            self._recipes.supersede(version, None, 0)

    def _constant_about_to_change(self, version: Version, why: str) -> None:
        """Rescue what depends on the content of `version`.

        Raises the budget error if that needs too much room.
        """
        escaped, version.escaped = version.escaped, True
        self._foreign.about_to_change(version)
        try:
            self._recipes.make_constant(version, why)
            self.rescue_dependents(version)
        finally:
            version.escaped = escaped

    # -- what depends on a constant ----------------------------------------------------------------

    def rescue_dependents(self, version: Version) -> None:
        """Rescue what was computed from the present content of a constant that is about to change.

        Evicted versions that the program still has are brought back; resident ones become constants. Raises
        the budget error.
        """
        if version.needed_by is None:
            return
        while True:
            evicted, released = self._dependents(version)
            if not evicted:
                break
            if self._garbage.before_rescue(sum([node.nbytes for node in evicted])):
                continue  # the program may not have them any more
            locks = Locks()
            with locks:
                locks.take(evicted)
                for node in evicted:
                    with suppress(LostError):
                        self._rematerializer.materialize((node,))
            for node in evicted:
                if node.resident:
                    self._recipes.make_constant(node, INPUT_MUTATED)
            # The rescue may have evicted another dependent to make room: check again.
        for node in released:
            self._recipes.lose(node)  # so that versions computed from it later are not considered replayable
        version.needed_by = None

    # -- operators that change ---------------------------------------------------------------------

    def operators_change(self, names: set[str]) -> None:
        """Operators with these names are about to have other kernels, or none: rescue what they have made.

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
            if node.operation is not None:  # the program has released it, or has written over it
                self.rescue_dependents(node)
                self._recipes.lose(node)

    def _made_by(self, names: set[str]) -> list[Version]:
        """Return what operators with these names have made, also what only recipes have."""
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

    def _dependents(self, version: Version) -> tuple[list[Version], list[Version]]:
        """Return what depends on `version`: evicted versions that the program has, and released ones.

        Resident ones become constants here, so what depends on them is safe.
        """
        self._ledger.collect_dead()
        evicted: list[Version] = []
        released: list[Version] = []
        # With their contents: the recipe of one may be all that keeps the memory of another.
        resident: list[tuple[Version, Any]] = []
        seen: set[int] = set()
        stack: list[Version] = [version]
        while stack:
            for reference in stack.pop().needed_by or ():
                node = reference()
                if node is None or node.operation is None or id(node) in seen:
                    continue
                seen.add(id(node))
                content = node.memory() if node.resident and node.scratch is None else None
                if content is not None:
                    resident.append((node, content))
                elif node.alive and not node.resident:
                    evicted.append(node)
                else:
                    released.append(node)
                    stack.append(node)
        for node, _ in resident:
            self._recipes.make_constant(node, INPUT_MUTATED)
        return evicted, released
