"""`--where`: from which module and which line of the program a recomputed operator was called."""

from __future__ import annotations

from dtrrun.core.graph import Operation, Version
from dtrrun.core.ledger import Ledger
from dtrrun.core.observer import DecisionObserver
from dtrrun.runtime.observe.callers import LINES, Callers


class Where(DecisionObserver):
    """Adds up replays by module, line and operator."""

    def __init__(self, callers: Callers, ledger: Ledger) -> None:
        self._callers, self._ledger = callers, ledger
        self._steps = [0, 0]
        self.tallies: dict[tuple[str, str, str], list[int]] = {}  # count, ns, bytes

    def install(self) -> None:
        self._callers.want("where", LINES)
        self._ledger.decision_observers.append(self)

    def remove(self) -> None:
        self._callers.want("where", 0)
        self._ledger.decision_observers.remove(self)

    def step_ended(self) -> None:
        """Forget old notes: even long-lived storages keep their recipes only for a step or two."""
        self._steps = [*self._steps[1:], self._ledger.age]
        self._callers.notes.forget(self._steps[0])

    def module_of(self, version: Version) -> str:
        """Return the module that called the operator that made the version, or "" if unknown."""
        return self._callers.at(version.age).module

    def rematerialized(self, version: Version, operation: Operation, started_ns: int, cost_ns: int) -> None:
        called = self._callers.at(version.age)
        key = called.module, called.line, operation.signature.operator.name
        tally = self.tallies.setdefault(key, [0, 0, 0])
        tally[0] += 1
        tally[1] += cost_ns
        tally[2] += version.nbytes
