"""Logs what the runtime is asked to do in a step, for `dtrrun record` and the search for a heuristic.

The log contains facts about the program (sizes, costs, which storages an operator reads and writes);
`dtrrun.simulator.live` derives their consequences under a budget, with the same core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dtrrun.core.graph import Geometry, Version
from dtrrun.core.ledger import SMALL_CONSTANTS
from dtrrun.core.observer import Observer
from dtrrun.core.operator import Call, Output
from dtrrun.runtime.costs import identity
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.observe import snapshot
from dtrrun.runtime.observe.step_log import Facts, StepLog, open_log


class Pending(NamedTuple):
    """An operator that has not run yet: facts for the log; by hole, its inputs' keys in the ledger, their
    bytes, and its tensors' geometries; and the first hole of each version that it writes to."""

    facts: Facts
    keys: list[int]
    nbytes: list[int]
    geometries: Sequence[Geometry]
    written: list[int]


class Recorder(Observer):
    """The log from the end of one step to the end of another, and its numbering of storages."""

    def __init__(self, path: str, first: int, last: int, cost: str, *, alone: bool = True) -> None:
        """first, last: steps, counted from 1 when the recorder is made. cost: how operators are priced.

        alone: nothing is evicted, so storages can die when the program releases them. Otherwise, small
        constants are kept for recipes, and die late.
        """
        self._path, self._first, self._last, self._cost, self._alone = path, first, last, cost, alone
        self._log: StepLog | None = None
        self._numbers: dict[int, int] = {}  # by the key of the storage's versions
        self._last_number = 0
        self._died: deque[int] = deque()
        self._pending: dict[int, Pending] = {}  # by id of the call
        self._identities: dict[Any, str] = {}
        self._locks = 0
        self._steps = 0
        self._backward = False
        self.error: str | None = None
        """Why the log could not be written."""

    def connect(self, callbacks: Callbacks) -> None:
        """Connect to a session."""
        self._callbacks, self._dtr, self._ledger = callbacks, callbacks.dtr, callbacks.ledger

    def install(self) -> None:
        pass  # it begins with its first step

    def remove(self) -> None:
        """Discard an unfinished log: the program ends before the step does."""
        if self._log is not None:
            self._log.discard()
            self._end()

    @property
    def ended(self) -> bool:
        """Whether the last step has been logged, or logging has failed: then there is an `error`."""
        return self._log is None and (self._steps >= self._last or self.error is not None)

    # -- steps -----------------------------------------------------------------------------------

    def step_ended(self) -> None:
        self._steps += 1
        self.step_begins()

    def step_begins(self) -> None:
        """Called before the first step, and at the end of each step."""
        if self._log is not None:
            self._annotate("STEP", step=self._steps)
            self._backward = False
            if self._steps >= self._last:
                try:
                    self._flush().close()
                except OSError as error:
                    self.error = error.strerror
                self._end()
        elif self._steps == self._first - 1:
            self._begin()

    def _begin(self) -> None:
        try:
            self._log = log = open_log(self._path)
        except OSError as error:
            self.error = error.strerror
            return
        if log is None:
            return
        ledger = self._ledger
        ledger.collect_dead()
        log.annotate("START", snapshot.head(self._dtr, self._first, self._last, self._cost))
        for key, version in ledger.versions.items():
            log.constant(self._number(key), version.nbytes, {})
        log.annotate("STATE", snapshot.state(self._dtr, self._numbers))
        if self._alone:  # a replay keeps them for as long as a session would
            ledger.small_constants = deque(maxlen=0)
        ledger.observers.append(self)

    def _end(self) -> None:
        self._log = None
        if self._alone:
            self._ledger.small_constants = deque(maxlen=SMALL_CONSTANTS)
        self._ledger.observers.remove(self)

    # -- storages --------------------------------------------------------------------------------

    def _number(self, key: int) -> int:
        self._last_number += 1
        self._numbers[key] = self._last_number
        return self._last_number

    def died(self, version: Version) -> None:
        number = self._numbers.pop(version.key, None)
        if number is not None:
            self._died.append(number)

    def _flush(self) -> StepLog:
        """Log the deaths so far."""
        assert self._log is not None
        while self._died:
            self._log.released(self._died.popleft())
        return self._log

    def _annotate(self, event: str, **facts: Any) -> None:
        self._flush().annotate(event, facts)

    def met(self, version: Version) -> None:
        """Log a storage that is new to the ledger as a constant of the step."""
        if version.key not in self._numbers:
            facts: Facts = {"pin": version.pin, "exposed": version.escaped}
            if version.device:
                facts["device"] = version.device
            # What is released during an operator is logged after it.
            if not self._pending:
                self._begins()
            assert self._log is not None
            self._log.constant(
                self._number(version.key), version.nbytes, facts | {"storage": self._last_number}
            )

    def changes(self, what: str, version: Version, **facts: Any) -> None:
        if not self._pending and version.key in self._numbers:
            self._annotate(what, storage=self._numbers[version.key], **facts)

    def period(self, what: str, **facts: Any) -> None:
        self._annotate(what, **facts)

    def locked(self, versions: list[Version]) -> Callable[[], None]:
        self._locks += 1
        number = self._locks
        if versions:
            self._annotate("LOCK", lock=number, storages=[self._numbers[one.key] for one in versions])

        def unlocked() -> None:
            if versions and self._log is not None:
                self._annotate("UNLOCK", lock=number)

        return unlocked

    # -- operators -------------------------------------------------------------------------------

    def _begins(self) -> None:
        self._flush()
        if not self._backward and torch._C._current_graph_task_id() != -1:
            self._backward = True
            assert self._log is not None
            self._log.annotate("BACKWARD")

    def admitted(self, call: Any) -> None:
        versions = call.versions
        for version in versions:
            self.met(version)  # C++ also uses versions that `met` has not been called with
        self._begins()
        written = call.written
        self._pending[id(call)] = Pending(
            self._facts(call, written),
            [version.key for version in versions],
            [version.nbytes for version in versions],
            call.geometries,
            [holes[0] for holes in written.values()],
        )

    def abandoned(self, call: Any) -> None:
        self._pending.pop(id(call), None)

    def failed(self, call: Any) -> None:
        pending = self._pending.pop(id(call), None)
        if pending is not None:
            self._annotate("FAILED", **pending.facts)

    def finished(self, call: Any, outputs: Sequence[Output]) -> None:
        """Log an operator with its outputs. Storages that died meanwhile are logged after it."""
        pending = self._pending.pop(id(call), None)
        if pending is None or self._log is None:
            return
        facts, versions, numbers = pending.facts, self._ledger.versions, self._numbers
        written = pending.written
        resized = {
            hole: nbytes
            for hole in written
            if (nbytes := versions[pending.keys[hole]].nbytes) != pending.nbytes[hole]
        }
        if resized:
            facts["resized"] = resized
        if call.signature.output_bytes != facts["bytes"]:
            facts["again"] = call.signature.output_bytes
        kinds = {where: kind for where, _, kind in outputs}
        made: list[tuple[int, int, Any]] = []
        views: list[tuple[int, Any]] = []
        new: list[Any] = []
        for where, result in enumerate(call.results):
            if result is None:
                facts["sparse"] = True
                continue
            storage, geometry = result
            version = self._ledger.version_of(storage)
            if version is None:
                continue
            if version.key in numbers:
                views.append((numbers[version.key], geometry))
                continue
            number = self._number(version.key)
            made.append((number, version.nbytes, geometry))
            new.append([where, number, version.nbytes, kinds.get(where, "")])
        if new:
            facts["out"] = new
        if call.handed_out:
            facts["taken"] = [numbers[version.key] for version in call.handed_out]
        keys = [pending.keys[hole] for hole in written]
        replaced = [numbers[key] for key in keys if versions[key].operation is not None]
        views = [view for view in views if not any(view[0] == numbers[key] for key in keys)]
        inputs: list[tuple[int, Geometry]] = list(zip(facts["in"], pending.geometries, strict=True))
        self._log.call(call.operator.name, inputs, made, views, replaced, call.signature.cost, facts)

    def _facts(self, call: Call, written: dict[int, list[int]]) -> Facts:
        """Return the facts from which the simulator rebuilds a call (`simulator.live.LoggedCall`)."""
        operator, numbers = call.operator, self._numbers
        key = call.identity
        if key not in self._identities:
            self._identities[key] = identity(key)
        facts: Facts = {
            "in": [numbers[version.key] for version in call.versions],
            "bytes": call.signature.output_bytes,
            "signature": self._identities[key],
        }
        flags = {
            "view": call.view,
            "short": call.view and operator.simple and not self._callbacks.reasons.any,
            "untouching": call.untouching,
            "once": not call.replayable,
            "uninitialised": call.uninitialised,
            "reshapes": call.reshapes,
            "opaque": call.opaque,
            "opaque_output": operator.opaque_output >= 0,
            "shrinks": call.shrinks,
            "fixes": operator.collective,
        }
        facts |= {name: True for name, value in flags.items() if value}
        if self._ledger.device:
            facts["device"] = self._ledger.device
        leaves = call.leaves
        if leaves:
            facts["leaves"] = leaves
        if written:
            facts["written"] = list(written.values())
            whole = [
                [place, call.versions[holes[0]].nbytes]
                for place, holes in enumerate(written.values())
                if call.overwrites(place)
            ]
            if whole:
                facts["overwritten"] = whole
        if (places := call.places) is not None:
            facts["places"] = places
        if call.statistics:
            facts["statistics"] = list(call.statistics)
            if call.updates_statistics:
                facts["updates"] = True
        return facts
