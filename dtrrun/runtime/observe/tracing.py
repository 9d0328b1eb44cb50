"""`--trace`: writes decisions to a file as they happen."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from time import monotonic_ns
from time import perf_counter_ns as now_ns
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from dtrrun.core.graph import Operation, Version
from dtrrun.core.ledger import Ledger
from dtrrun.core.observer import DecisionObserver
from dtrrun.runtime.observe.steps import is_inner
from dtrrun.telemetry.events import EVICT, LEAVE, MODULE, REMATERIALIZE, RETURN, SEARCH, STEP, EventWriter


class Tracing(DecisionObserver):
    """Writes evictions, searches, rematerializations and copies to the host to a file in `folder`.

    Times are the host's: on a GPU an operator's time is that of its launch. module_of: returns a version's
    module, under `--where`.
    """

    def __init__(
        self, ledger: Ledger, folder: str, module_of: Callable[[Version], str] | None = None
    ) -> None:
        self._ledger = ledger
        self._folder = folder
        self._module_of = module_of
        self._steps = 0

    def install(self) -> None:
        """Begin to write. Raises OSError if the file can't be created."""
        self._writer = EventWriter(self._folder)
        # The events' clock is common to all processes. The clocks are compared only once: if each event did
        # it, a delay between the two readings could make it seem to begin before the previous event.
        self._ahead_ns = max(monotonic_ns() - now_ns() for _ in range(4))
        atexit.register(self._writer.close)
        self._stepped_ns = now_ns()
        self._handle = register_optimizer_step_post_hook(self._stepped)
        self._ledger.decision_observers.append(self)

    def remove(self) -> None:
        self._ledger.decision_observers.remove(self)
        self._handle.remove()
        atexit.unregister(self._writer.close)
        self._writer.close()

    def evicted(self, version: Version, started_ns: int) -> None:
        self._add(EVICT, self._name_of(version, version.operation), started_ns, version.nbytes)

    def searched(self, victim: Version | None, started_ns: int) -> None:
        name = "" if victim is None else self._name_of(victim, victim.operation)
        self._add(SEARCH, name, started_ns, 0 if victim is None else victim.nbytes)

    def rematerialized(self, version: Version, operation: Operation, started_ns: int, cost_ns: int) -> None:
        nbytes = operation.signature.output_bytes
        self._add(REMATERIALIZE, self._name_of(version, operation), started_ns, nbytes)

    def left(self, version: Version, started_ns: int) -> None:
        self._add(LEAVE, self._name_of(version, version.operation), started_ns, version.nbytes)

    def returned(self, version: Version, started_ns: int) -> None:
        self._add(RETURN, self._name_of(version, version.operation), started_ns, version.nbytes)

    def _stepped(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_inner():
            return
        self._steps += 1
        self._add(STEP, "", self._stepped_ns, self._steps)
        self._stepped_ns = now_ns()

    def _name_of(self, version: Version, operation: Operation | None) -> str:
        """Return the names of the operator that makes the version, and of its module; else what it is."""
        if operation is None:
            return version.pin or "constant"
        name: str = operation.signature.operator.name
        module = self._module_of(version) if self._module_of is not None else ""
        return f"{name}{MODULE}{module}" if module else name

    def _add(self, kind: int, name: str, started_ns: int, nbytes: int) -> None:
        ledger = self._ledger
        started = started_ns + self._ahead_ns
        self._writer.add(kind, name, started, nbytes, ledger.resident_bytes, ledger.evicted_bytes)
