"""Recipes: which versions can be recomputed, and what keeps them recomputable.

A version without a recipe is a constant: it is never evicted. Before a version is evicted for the first time
its recipe is secured, down to the constants. From then on it stays replayable, whatever the program releases.
"""

from __future__ import annotations

import weakref
from typing import Any

from dtrrun.core.foreign import Foreign
from dtrrun.core.graph import Operation, Version
from dtrrun.core.ledger import INPUT_LOST, Decision, Ledger
from dtrrun.core.observer import PINNED


class Recipes:
    """Makes, secures and drops recipes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.foreign = Foreign(ledger, self)

    def make_constant(self, version: Version, pin: str) -> None:
        """Drop the recipe of a resident version, so that it can't be evicted any more. pin: the reason."""
        if version.operation is not None:
            content = version.memory()
            for reference in version.needed_by or ():
                node = reference()
                if node is not None and node.operation is not None and node.operation.secured:
                    node.operation.constants = (*(node.operation.constants or ()), content)
            self._ledger.decided_about(Decision.PINNED, version)
            if self._ledger.pressure:
                self._ledger.policy.discard(version)
            version.operation = None  # last: after an interrupt all of this is done again
        if version.pin is None:
            version.pin = pin

    def pin(self, version: Version, why: str) -> None:
        """Keep a resident version in memory from now on. why: the reason."""
        for observer in self._ledger.observers:
            observer.changes(PINNED, version, why=why)
        self.make_constant(version, why)
        version.pin = why

    def secure(self, version: Version) -> bool:
        """Make sure that `version` stays recomputable, whatever the program releases or mutates from now on.

        Recipes keep the constants that they read alive. Returns False if an input is lost already; then the
        version must stay in memory. The search covers the unsecured part of the graph, with an explicit
        stack.
        """
        if version.operation is None:
            return False
        stack: list[tuple[Version, int, list[Any]]] = [(version, 0, [])]
        while stack:
            node, position, constants = stack.pop()
            operation = node.operation
            if operation is None or operation.secured:
                continue
            inputs = operation.inputs
            broken = False
            while position < len(inputs):
                source = inputs[position]
                if source.operation is not None:
                    if not source.operation.secured:
                        stack.append((node, position, constants))
                        stack.append((source, 0, []))
                        break
                else:
                    content = source.memory() if source.resident else None
                    if source.escaped and not self.foreign.may_be_read(source):
                        content = None
                    # A gradient is released soon: keeping it for a replay would take the memory that the
                    # eviction frees.
                    if content is None or source.pin == "gradient":
                        broken = True
                        break
                    constants.append(content)
                position += 1
            else:
                operation.constants = tuple(constants)
                for output in operation.versions(node):
                    for source in inputs:
                        _note_dependent(source, output)
                operation.secured = True  # last: after an interrupt all of this is done again
                continue
            if broken:
                if node.resident and node.scratch is None:
                    self.make_constant(node, INPUT_LOST)
                else:
                    # It is neither resident nor replayable, and nor are those above it in the stack, up to a
                    # resident one.
                    self.lose(node)
        return version.operation is not None

    def lose(self, version: Version) -> None:
        """A version that is not in memory can't be recomputed any more."""
        ledger = self._ledger
        ledger.decided_about(Decision.LOST, version)
        if ledger.pressure:
            ledger.policy.forget(version)
        if version.scratch is not None:
            if ledger.pressure:
                ledger.policy.discard(version)
            ledger.drop_scratch(version)
        version.operation = None

    def end(self) -> None:
        """Nothing will be recomputed any more: let go of the storages that recipes have kept alive.

        Otherwise the next session would take them for storages that the program holds itself.
        """
        ledger = self._ledger
        seen: set[int] = set()
        stack: list[Version] = [*ledger.versions.values(), *ledger.scratch.values()]
        while stack:
            version = stack.pop()
            operation = version.operation
            if operation is None:
                version.copy = None
                if version.scratch is not None:
                    version.scratch, version.resident = None, False
            elif id(operation) not in seen:
                seen.add(id(operation))
                operation.constants, operation.kept_inputs = None, ()
                stack.extend(operation.inputs)

    def supersede(self, version: Version, operation: Operation | None, cost: int) -> Version:
        """Make a new version that takes over the storage of `version`, which has been mutated, and return it.

        operation: the mutation as a recipe, or None if there is none. cost: that of the operation, in ns.
        """
        ledger = self._ledger
        storage = version()
        assert storage is not None
        made = ledger.graph.new_version(storage, ledger.on_death, version.nbytes, version.age, ledger.clock)
        made.mutations = version.mutations + 1
        if ledger.fingerprints is not None:
            made.extent = version.extent
        made.escaped = version.escaped
        # In this order: an interrupt in between must not leave two versions that both own the storage.
        version.superseded = True
        version.scratch, version.copy = version.copy, None
        version.resident = version.scratch is not None
        version.escaped = version.escaped and not version.resident  # nobody else can reach the copy
        version.uses = ()
        ledger.versions[made.key] = made
        if operation is None:
            made.pin = version.pin or "mutated"
        else:
            made.operation, made.cost = operation, cost
        if ledger.pressure:
            if version.operation is not None:
                ledger.policy.released(version)
            if operation is not None:
                ledger.evictable(made)
        return made

    def half_written(self, version: Version) -> Version | None:
        """A failed operator may have written to the storage.

        Return the version it has now, a constant; the old version keeps its recipe.
        """
        current = self._ledger.versions.get(version.key)
        return None if current is None else self.supersede(current, None, 0)


def _note_dependent(source: Version, node: Version) -> None:
    dependents = source.needed_by
    if dependents is None:
        source.needed_by = dependents = []
    dependents.append(weakref.ref(node))
    if len(dependents) & (len(dependents) - 1) == 0 and len(dependents) >= 64:
        # A constant that is never mutated gathers dependents forever: drop the dead ones occasionally.
        dependents[:] = [reference for reference in dependents if reference() is not None]
