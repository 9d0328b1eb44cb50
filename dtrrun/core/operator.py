"""One operator of the program, as the slow path describes it (`core/operator.h`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dtrrun.core.graph import Overwritten, Signature, Version
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


class Call:
    """One operator call in progress. `hole`: a tensor's index among the tensor arguments."""

    # Reading a slot is several times as fast as reading a default from the class.
    __slots__ = (
        "cost",
        "handed_out",
        "opaque",
        "recordable",
        "replayable",
        "reshapes",
        "shrinks",
        "signature",
        "statistics",
        "uninitialised",
        "untouching",
        "updates_statistics",
        "versions",
        "view",
        "written",
    )
    signature: Signature
    versions: list[Version]
    """The versions of its tensor arguments, by hole."""
    written: dict[int, list[int]]
    """By id of each version that it writes to: the holes through which it writes."""
    replayable: bool
    """Whether the operator and its arguments allow a replay."""
    recordable: bool
    """Whether it gets a recipe; known once it is admitted."""
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

    def __init__(self) -> None:
        self.versions, self.written = [], {}
        self.statistics = self.handed_out = ()
        self.replayable = self.recordable = True
        self.view = self.untouching = self.reshapes = self.opaque = False
        self.uninitialised = self.shrinks = self.updates_statistics = False
        self.cost = 0

    def is_leaf(self, place: int) -> bool:
        """Return whether the `place`-th version written is an autograd leaf, written through that leaf."""
        raise NotImplementedError

    def overwrites(self, place: int) -> bool:
        """Return whether it overwrites all of the `place`-th version written, without reading it."""
        raise NotImplementedError

    def overwritten(self, place: int) -> Overwritten:
        """Return the entry in the recipe for a version that it overwrites."""
        raise NotImplementedError

    def resized(self, hole: int, version: Version) -> int | None:
        """Return the bytes that a version takes after being written to; None if unchanged."""
        raise NotImplementedError

    def made(self, nbytes: int) -> None:
        """Note that `nbytes` bytes of its results are new."""

    def recorded(self) -> Any:
        """Return what the executor needs to run it again."""
        raise NotImplementedError

    def replay_signature(self) -> Signature:
        """Return the signature of a replay: without the running statistics, if it has any."""
        return self.signature


class Finish(Protocol):
    def __call__(self, call: Call, outputs: Sequence[Output], *, plain: bool = True) -> None:
        """plain: all results have a plain storage."""


class Adopt(Protocol):
    def __call__(self, storage: Any, *, pin: str = "constant") -> Version: ...


class Operators:
    """Admits and finishes the program's operators (`core/operator.h`)."""

    admit: Callable[[Call], None]
    """Bring the inputs back, rescue what a mutation would lose, make room and reserve it.

    If this raises, for instance the budget error, `abandon` releases what the call has taken.
    """
    abandon: Callable[[Call], None]
    """Release what a call that does not run has taken."""
    fail: Callable[[Call], None]
    """Handle a call that has raised: the program gets its error, and nothing stays locked."""
    finish: Finish
    """Enter what a call has made; its cost is known. Raises the budget error if its outputs exceed it."""
    adopt: Adopt
    """Enter a storage that no recorded operator made, as a constant; pin: why it can't be evicted."""

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
        self.met_device = met_device or _nothing
        self.room_given_back = room_given_back or _nothing


def _nothing(*_: Any) -> None:
    pass
