"""`dtrrun record`: what the runtime is asked to do in a step, written down while it happens.

While a step is being recorded every operator takes the careful way, and storages die
when the program lets go of them. What is written are facts about the program (sizes, costs, which storages an
operator reads and writes); what follows from them under a budget is for `dtrrun.simulator.live` to find out,
by the same ledger.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any, NamedTuple

import torch

from dtrrun.ledger.record import Geometry, Record
from dtrrun.ledger.storages import SMALL_CONSTANTS
from dtrrun.runtime import snapshot
from dtrrun.runtime.arguments import geometry_of, outputs_of
from dtrrun.runtime.ledger import Ledger
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.outcomes import is_odd
from dtrrun.runtime.step_log import Facts, StepLog, open_log
from dtrrun.runtime.storage import storage_of


class Recorder:
    """The log from the end of one step to the end of another, and the numbers of the storages in it."""

    def __init__(self, path: str, first: int, last: int, cost: str) -> None:
        self._path, self._first, self._last, self._cost = path, first, last, cost
        self._log: StepLog | None = None
        self.numbers: dict[int, int] = {}  # by the key of the storage's record
        self._last_number = 0
        self._died: deque[int] = deque()
        self.steps = 0
        self.inside = 0  # operators under way
        self._backward = False
        self.error: str | None = None
        """Why the log could not be written."""

    @property
    def active(self) -> bool:
        return self._log is not None

    def step_begins(self, ledger: Ledger) -> None:
        """Before the first step, and after the end of each."""
        if self._log is not None:
            self.annotate("STEP", step=self.steps)
            self._backward = False
            if self.steps >= self._last:
                try:
                    self._flush().close()
                except OSError as error:
                    self.error = error.strerror
                self._log = None
                ledger.small_constants = deque(maxlen=SMALL_CONSTANTS)
        elif self.steps == self._first - 1:
            self._begin(ledger)

    def _begin(self, ledger: Ledger) -> None:
        if os.environ.get("RANK", "0") != "0":
            return  # another process of the same program
        try:
            self._log = log = open_log(self._path)
        except OSError as error:
            self.error = error.strerror
            return
        if log is None:
            return
        log.annotate("START", snapshot.head(ledger, self._first, self._last, self._cost))
        for key, record in ledger.records.items():
            log.constant(self._number(key), record.nbytes, {})
        log.annotate("STATE", snapshot.state(ledger, self.numbers))
        # From now on they die when the program lets go of them; a replay keeps them for as long as we would.
        ledger.small_constants = deque(maxlen=0)

    def abandon(self) -> None:
        """The program ends before the step does."""
        if self._log is not None:
            self._log.discard()
            self._log = None

    def _number(self, key: int) -> int:
        self._last_number += 1
        self.numbers[key] = self._last_number
        return self._last_number

    def died(self, record: Record) -> None:
        """At any moment, in any thread."""
        number = self.numbers.pop(record.key, None)
        if number is not None:
            self._died.append(number)

    def _flush(self) -> StepLog:
        assert self._log is not None
        while self._died:
            self._log.released(self._died.popleft())
        return self._log

    def flush(self) -> None:
        """Write down what has died so far."""
        if self._log is not None:
            self._flush()

    def annotate(self, event: str, **facts: Any) -> None:
        if self._log is not None:
            self._flush().annotate(event, facts)

    def meet(self, record: Record) -> None:
        """A storage that the ledger has just met is a constant of the step."""
        if self._log is not None and record.key not in self.numbers:
            facts: Facts = {"pin": record.pin, "exposed": record.exposed}
            # What an operator that is under way lets go of is released after it.
            log = self._log if self.inside else self._flush()
            log.constant(self._number(record.key), record.nbytes, facts | {"storage": self._last_number})

    def operator_begins(self) -> None:
        if self._log is not None:
            self._flush()
            if not self._backward and torch._C._current_graph_task_id() != -1:
                self._backward = True
                self._log.annotate("BACKWARD")

    def operator_ended(
        self, operator: Operator, pending: Pending, ledger: Ledger, result: Any, cost: int
    ) -> None:
        """Write an operator down, with what it made. What died meanwhile comes after it."""
        if self._log is None:
            return
        facts = pending.facts
        made: list[tuple[int, int, Any]] = []
        views: list[tuple[int, Any]] = []
        new: list[Any] = []
        for where, tensor in enumerate(outputs_of(result, [])):
            try:
                record = ledger.records[id(storage_of(tensor))]
            except (NotImplementedError, RuntimeError):
                facts["sparse"] = True
                continue
            except KeyError:
                continue
            if record.key in self.numbers:
                views.append((self.numbers[record.key], geometry_of(tensor)))
                continue
            number = self._number(record.key)
            made.append((number, record.nbytes, geometry_of(tensor)))
            new.append([where, number, record.nbytes, _kind(tensor, operator, ledger)])
        if new:
            facts["out"] = new
        if facts.pop("takes", False):
            facts["taken"] = [number for number, _ in views]
        written = [pending.keys[holes[0]] for holes in facts.get("written", ())]
        replaced = [self.numbers[key] for key in written if ledger.records[key].op is not None]
        views = [view for view in views if not any(view[0] == self.numbers[key] for key in written)]
        inputs = list(zip(facts["in"], pending.geometries, strict=True))
        self._log.call(operator.name, inputs, made, views, replaced, cost, facts)


class Pending(NamedTuple):
    """An operator that has not run yet: facts for the log; its inputs' keys in the ledger, and geometries."""

    facts: Facts
    keys: list[int]
    geometries: list[Geometry]


def _kind(tensor: torch.Tensor, operator: Operator, ledger: Ledger) -> str:
    if is_odd(tensor, operator):
        return "odd"
    return "elsewhere" if tensor.device.type != ledger.device_type else ""
