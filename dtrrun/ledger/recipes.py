"""Recipes: which storages can be recomputed, and what keeps it so (design note, section 3, mutation)."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from dtrrun.ledger.foreign import LostError
from dtrrun.ledger.locks import Locks
from dtrrun.ledger.record import Op, Record, new_record
from dtrrun.ledger.storages import Storages

CHAIN_LIMIT = 32  # mutations that a recipe may replay before the storage becomes a constant


class Recipes(Storages):
    """Versions of storages, and the recipes between them."""

    out_of_memory: type[Exception]
    """What a rematerialization may end with, `BudgetError` included."""

    def make_constant(self, record: Record, pin: str) -> None:
        """Drop the recipe of a resident storage: from now on it can't be evicted."""
        if record.op is not None:
            content = record.memory()
            for reference in record.secured_by or ():
                node = reference()
                if node is not None and node.op is not None and node.op.secured:
                    node.op.held = (*(node.op.held or ()), content)
            if self.pressure:
                self.policy.discard(record)
            record.op = None  # last: after an interrupt all of this is done again
        if record.pin is None:
            record.pin = pin

    def secure(self, record: Record) -> bool:
        """Make sure that `record` can be recomputed whatever the program releases or mutates from now on.

        Constants that its replay reads are kept alive by the recipes that need them. False if something is
        lost already; then the record must stay. The search is over the part of the graph that is not
        secured yet, with a stack of its own.
        """
        if record.op is None:
            return False
        stack: list[tuple[Record, int, list[Any]]] = [(record, 0, [])]
        while stack:
            node, position, held = stack.pop()
            op = node.op
            if op is None or op.secured:
                continue
            inputs = op.inputs
            broken = False
            while position < len(inputs):
                source = inputs[position]
                if source.op is not None:
                    if not source.op.secured:
                        stack.append((node, position, held))
                        stack.append((source, 0, []))
                        break
                else:
                    content = source.memory() if source.resident else None
                    if source.exposed and not self.foreign.may_be_read(source):
                        content = None
                    # A gradient is let go of soon: to keep it for a replay would take what an eviction gives.
                    if content is None or source.pin == "gradient":
                        broken = True
                        break
                    held.append(content)
                position += 1
            else:
                op.held = tuple(held)
                for output in op.records(node):
                    for source in inputs:
                        _note_dependent(source, output)
                op.secured = True  # last: after an interrupt all of this is done again
                continue
            if broken:
                if node.resident and node.held is None:
                    self.make_constant(node, "input lost")
                else:
                    # Neither here nor replayable: so are those above it in the stack, up to one that is here.
                    self.lose(node)
        return record.op is not None

    def lose(self, node: Record) -> None:
        """What is not in memory can't be recomputed any more."""
        if self.pressure:
            self.policy.forget(node)
        if node.held is not None:
            if self.pressure:
                self.policy.discard(node)
            self.drop(node)
        node.op = None

    def before_mutation(self, record: Record) -> None:
        """Rescue what was computed from the present content of a constant that is about to change.

        Evicted storages that the program still has are brought back; resident ones become constants.
        """
        if record.secured_by is None:
            return
        while True:
            rescued, lost = self._dependents(record)
            if not rescued:
                break
            locks = Locks()
            with locks:
                locks.take(rescued)
                for node in rescued:
                    with suppress(LostError):
                        self.rematerialize((node,))
            for node in rescued:
                if node.resident:
                    self.make_constant(node, "input mutated")
            # To make room, the rescue may have evicted another dependent: look again.
        for node in lost:
            self.lose(node)  # what is computed from it later must not take it for replayable
        record.secured_by = None

    def _dependents(self, record: Record) -> tuple[list[Record], list[Record]]:
        """What relies on `record` being recomputable from: evicted storages of the program, and dead ones.

        Those that are in memory become constants here, and shield what depends on them.
        """
        evicted: list[Record] = []
        dead: list[Record] = []
        seen: set[int] = set()
        stack: list[Record] = [record]
        while stack:
            for reference in stack.pop().secured_by or ():
                node = reference()
                if node is None or node.op is None or id(node) in seen:
                    continue
                seen.add(id(node))
                if node.resident and node.held is None:
                    self.make_constant(node, "input mutated")
                elif node.alive and not node.resident:
                    evicted.append(node)
                else:
                    dead.append(node)
                    stack.append(node)
        return evicted, dead

    def trusted(self, record: Record) -> None:
        """Things can be recomputed from a foreign storage from now on (see `foreign`)."""

    def supersede(self, record: Record, op: Op | None, cost: int) -> Record:
        """The storage of `record` has been mutated: a new version takes it over. Returns that version."""
        storage = record()
        assert storage is not None
        version = new_record(storage, self.on_death, record.nbytes, record.age, self.clock)
        version.version = record.version + 1
        if self.fingerprints is not None:
            version.extent = record.extent
        version.exposed = record.exposed
        # In this order: an interrupt in between must not leave two versions that both own the storage.
        record.superseded = True
        record.resident = False
        record.uses = ()
        self.records[version.key] = version
        if op is None:
            version.pin = record.pin or "mutated"
        else:
            version.op, version.cost = op, cost
        if record.op is not None and self.pressure:
            self.policy.released(record)
        if self.pressure and op is not None and version.nbytes >= self.least_bytes:
            self.policy.insert(version)
        return version


def _note_dependent(source: Record, node: Record) -> None:
    dependents = source.secured_by
    if dependents is None:
        source.secured_by = dependents = []
    dependents.append(weakref.ref(node))
    if len(dependents) & (len(dependents) - 1) == 0 and len(dependents) >= 64:
        # A constant that is never mutated gathers dependents forever: forget the dead ones now and then.
        dependents[:] = [reference for reference in dependents if reference() is not None]
