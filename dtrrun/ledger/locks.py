"""Locks that are given back whatever happens, an interrupt at any moment included.

Python looks for signals where a function begins, after a call, and where a loop goes round. So what belongs
together is done without any of these in between, and what gives back can be called again.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtrrun.ledger.record import Record


class Locks:
    """What it takes stays locked until it is called, its context ends, or it dies.

    An interrupt may keep a `with` or `finally` from its work: then nobody has the object any longer.
    """

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken: list[Record] = []

    def take(self, records: Iterable[Record]) -> None:
        """Lock each of these once more."""
        taken = self.taken
        for record in records:
            record.locks += 1
            taken.append(record)

    def __call__(self) -> None:
        unlock(self.taken)

    def __enter__(self) -> Locks:
        return self

    def __exit__(self, *exc: object) -> None:
        unlock(self.taken)

    def __del__(self) -> None:
        unlock(self.taken)


def unlock(taken: list[Record]) -> None:
    """Unlock each of these once, and empty the list; may be called again after an interrupt."""
    while taken:
        taken[-1].locks -= 1
        del taken[-1]
