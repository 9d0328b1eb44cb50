"""The program's operators, as their observers see them (`core/operator.h`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dtrrun.core import bound
from dtrrun.core.graph import Geometry, Signature, Version
from dtrrun.core.ledger import Ledger

NEW = ""
"""Kind of output: a new storage, which can be evicted if the operator has a recipe."""
UNTRACKED = "untracked"
"""Not a plain tensor over a storage: neither evicted nor recomputed from."""
READ_NATIVELY = "read natively"
"""Code that is not an operator reads it: it stays in memory."""
ELSEWHERE = "elsewhere"
"""It is on another device."""
FOREIGN = "foreign"
"""Its memory is not from our allocator."""


Output = tuple[int, Any, str]
"""A storage that an operator has made, and that was not in the ledger before.

A tuple of its tensor's index among the results, the storage, and its kind.
"""


class Call(Protocol):
    """One operator call in progress (`native/observed.h`). `hole`: an index among its tensor arguments
    that have a version.

    Most attributes can be read until its kernel runs, the others once its results are in the ledger.
    """

    operator: Any
    """What is known of the operator."""
    signature: Signature
    identity: tuple[Any, ...]
    """What calls have in common that cost the same in every process."""
    versions: Sequence[Version]
    """The versions of its tensor arguments, by hole."""
    geometries: Sequence[Geometry]
    """Their geometries."""
    leaves: list[int]
    """The holes of leaves of autograd."""
    written: dict[int, list[int]]
    """By id of each version that it writes to: the holes through which it writes."""
    places: list[int] | None
    """The place of each tensor in the operator's lists, -1 for one that is in none of them; None if the call
    can't be split into calls with parts of the lists."""
    replayable: bool
    """Whether the operator and its arguments allow a replay."""
    view: bool
    """Its results are views: nothing is entered, and recreating them is free."""
    untouching: bool
    """It does not read its inputs' memory."""
    reshapes: bool
    """It may change which memory a storage has."""
    opaque: bool
    """An input has no plain storage."""
    uninitialised: bool
    """Its results are uninitialised."""
    shrinks: bool
    """It may have allocated more than predicted."""
    statistics: Sequence[int]
    """Holes of running statistics, which a replay neither reads nor updates."""
    updates_statistics: bool
    """This call updates the running statistics."""
    handed_out: Sequence[Version]
    """Versions that other code can reach once it has run."""
    cost: int
    """Cost in ns, once it has run."""
    results: Sequence[tuple[Any, Geometry] | None]
    """The storage and geometry of each tensor among its results; None for those without a plain one."""

    def overwrites(self, place: int) -> bool:
        """Return whether it overwrites all of the `place`-th version written, without reading it."""


class Operators(bound.Operators):
    """Admits and finishes the program's operators, which C++ describes (`core/operator.h`)."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        met_device: Callable[[str], None] | None = None,
        room_given_back: Callable[[], None] | None = None,
    ) -> None:
        """met_device: called with the type of another device that a tensor is on.

        room_given_back: called when a call has entered its results or failed, and its reservation and locks
        are released.
        """
        super().__init__(ledger)
        self.met_device = met_device or _nothing
        self.room_given_back = room_given_back or _nothing


def _nothing(*_: Any) -> None:
    pass
