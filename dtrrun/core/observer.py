"""Observers of a run: the log of a step, a trace, `--where`, heuristics with foresight.

C++ reports decisions, operators and the deaths of storages. Without observers, that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dtrrun.core.graph import Operation, Version

if TYPE_CHECKING:
    from dtrrun.core.operator import Call, Output


class DecisionObserver:
    """What the policy does (`Ledger.decision_observers`): base class whose methods do nothing.

    `started_ns` is from `time.perf_counter_ns`.
    """

    def searched(self, victim: Version | None, started_ns: int) -> None:
        """The policy has searched for a victim."""

    def evicted(self, version: Version, started_ns: int) -> None: ...

    def rematerialized(self, version: Version, operation: Operation, started_ns: int, cost_ns: int) -> None:
        """An operation was run again because `version` was needed."""

    def left(self, version: Version, started_ns: int) -> None:
        """A version has left for the host."""

    def returned(self, version: Version, started_ns: int) -> None:
        """A version has come back from the host."""


class Observer:
    """What the program does (`Ledger.observers`): base class whose methods do nothing.

    A call in C++ has its attributes until it is over, and most of them only until it runs.
    """

    # -- operators -------------------------------------------------------------------------------

    def admitted(self, call: Call) -> None:
        """Before room is made for an operator."""

    def finished(self, call: Call, outputs: Sequence[Output]) -> None:
        """An operator has run, and its outputs are in the ledger.

        outputs: given only if some are not plain.
        """

    def failed(self, call: Call) -> None:
        """An operator has raised."""

    def abandoned(self, call: Call) -> None:
        """An operator will not run, because there is no room for it."""

    def met(self, version: Version) -> None:
        """An operator has received a tensor over that version's storage."""

    def died(self, version: Version) -> None:
        """The storage of a version is gone; it may have been for some time."""

    # -- before something happens that is not part of an operator ----------------------------------

    def changes(self, what: str, version: Version, **facts: Any) -> None:
        """Something is about to be done to a version. what: one of the names below."""

    def locked(self, versions: list[Version]) -> Callable[[], None]:
        """Code other than an operator has locked versions.

        Returns a function to be called when it unlocks them.
        """
        return _nothing

    def period(self, what: str, **facts: Any) -> None:
        """Something is about to be done to all versions. what: one of the names below."""


def _nothing() -> None:
    pass


ESCAPES, WRITTEN_OUTSIDE, TRUSTED = "EXPOSE", "OUTSIDE", "TRUST"
PINNED, FIXED, RESIZED = "PIN", "FIX", "RESIZED"
COMPACTS, PERIOD_ENDS, RESTORES = "COMPACT", "PERIOD", "RESTORE"
"""The names of these events in the log of a step."""
