"""What becomes of recipes when a storage is written to: by operators, or by code that no operator shows."""

from __future__ import annotations

from collections.abc import Callable

from dtrrun.ledger.history import History
from dtrrun.ledger.recipes import CHAIN_LIMIT
from dtrrun.ledger.record import Record

STICKY = ("parameter", "gradient", "pinned", "loaded or copied", "foreign memory")
"""Pins that an overwrite of the whole storage does not end."""


class Writes(History):
    """Decides which mutations get a recipe, and rescues what the others destroy."""

    def expose(self, record: Record, why: str) -> None:
        """Other code can reach the memory from now on: it stays, and nothing is replayed from it."""
        if not record.exposed or self.foreign.trusts(record):
            self._constant_about_to_change(record, why)
            record.exposed = True
            record.pin = why
        self.foreign.give_up(record)

    def written_outside(self, record: Record, why: str, *, exposes: bool) -> None:
        """Code that is no operator is about to write to the memory; `exposes`: or may, at any later time."""
        self._constant_about_to_change(record, why)
        record.exposed = record.exposed or exposes  # so are the versions to come
        if exposes:
            self.foreign.give_up(record)
        record.pin = record.pin or why
        if record.used:
            self.supersede(record, None, 0)

    def _constant_about_to_change(self, record: Record, why: str) -> None:
        """Nothing may rely on what `record` holds any more. Raises BudgetError if that needs room."""
        exposed, record.exposed = record.exposed, True
        self.foreign.about_to_change(record)
        try:
            self.make_constant(record, why)
            self.before_mutation(record)
        finally:
            record.exposed = exposed

    def half_written(self, record: Record) -> None:
        """What a failed operator may have written to is a constant; the old version keeps its recipe."""
        current = self.records.get(record.key)
        if current is not None:
            self.supersede(current, None, 0)

    def pin(self, record: Record, why: str) -> None:
        """Keep a resident storage in memory from now on."""
        self.make_constant(record, why)
        record.pin = why

    def prepare_writes(
        self,
        targets: list[Record],
        recordable: bool,
        leaf: Callable[[int], bool],
        overwritten: Callable[[int], bool],
        changing: list[Record],
    ) -> bool:
        """Before an operator writes to `targets`: whether it gets a recipe, for all of them; else see to it
        that nothing is lost.

        recordable: it can be replayed. By their places in `targets`: is it a leaf of autograd, and is all of
        it overwritten unread? changing: see `about_to_change`.
        """
        for place, record in enumerate(targets):
            if leaf(place):
                self.pin(record, "parameter")
                recordable = False
            elif record.op is None:
                recordable = recordable and record.pin not in STICKY and overwritten(place)
            elif record.age < self.step_age or record.version >= CHAIN_LIMIT:
                # State that lives on over steps (running averages): its history is not worth keeping.
                recordable = False
        if not recordable:
            for record in targets:
                self.make_constant(record, "updated in place")
        self.about_to_change([record for record in targets if record.op is None], changing)
        return recordable

    def about_to_change(self, constants: list[Record], changing: list[Record]) -> None:
        """Rescue what depends on constants that an operator is going to write to.

        Until it has (see `changing`, to which they are added) nothing else may come to rely on them.
        """
        for record in constants:
            if not record.exposed:
                record.exposed = True
                changing.append(record)
            else:
                self.foreign.about_to_change(record)
        for record in constants:
            self.before_mutation(record)
