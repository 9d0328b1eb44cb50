"""A log with its names resolved: what is computed, and when each storage loses its last reference.

References (COPY, COPYFROM, RELEASE and what a mutation replaces) do not depend on the budget, so the paper's
reference layer (App. C.6) runs once, and every replay starts from its result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dtrrun.bindings import load
from dtrrun.core.foresight import WatchedStep

from .log import (
    BACKWARD,
    Annotate,
    Call,
    Constant,
    Copy,
    CopyFrom,
    Instruction,
    LogError,
    Mutate,
    Release,
    read_log,
)

CONSTANT = "constant"


@dataclass(frozen=True)
class Operator:
    """A call: inputs and outputs are indices of tensors; cost in ns. A constant has no inputs and no cost.

    workspace: bytes that it needs while it runs, in addition to its outputs. Always 0 in logs, but not for a
    group of operators that runs as one.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: int
    workspace: int = 0


@dataclass
class Schedule:
    """Tensors and storages are numbered in order of appearance."""

    name: str
    operators: list[Operator] = field(default_factory=list)
    storage_of: list[int] = field(default_factory=list)
    """Per tensor. A storage's first tensor is its root; the others are aliases."""
    operator_of: list[int] = field(default_factory=list)
    """Per tensor: iop(t)."""
    nbytes: list[int] = field(default_factory=list)
    """Per storage."""
    roots: list[int] = field(default_factory=list)
    """Per storage: iroot(S)."""
    events: list[int] = field(default_factory=list)
    """In order: i means call operator i; ~i means storage i has lost its last external reference."""
    outputs: list[int] = field(default_factory=list)
    """Tensors that the program holds at the end, one for each name (output condition)."""
    backward: int | None = None
    """The event that begins the backward pass, if the log marks it."""

    @property
    def cost(self) -> int:
        """Return the total time of all operators in ns: that of the plain run."""
        return sum(operator.cost for operator in self.operators)

    @property
    def constants(self) -> set[int]:
        """The constant storages."""
        return {
            self.storage_of[one]
            for operator in self.operators
            if operator.name == CONSTANT
            for one in operator.outputs
        }

    @property
    def constant_bytes(self) -> int:
        return sum(self.nbytes[one] for one in self.constants)

    @property
    def peak_bytes(self) -> int:
        """Return the program's peak memory, if storages live as long as they are referenced."""
        held = peak = 0
        for event in self.events:
            if event < 0:
                held -= self.nbytes[~event]
            else:
                held += sum(self.made_by(self.operators[event]))
                peak = max(peak, held + self.operators[event].workspace)
        return peak

    @property
    def largest_bytes(self) -> int:
        """Return the most bytes of one operator's inputs and outputs, without constants: the least budget."""
        most = 0
        for operator in self.operators:
            if operator.name == CONSTANT:
                continue
            inputs = {
                self.storage_of[one]
                for one in operator.inputs
                if self.operators[self.operator_of[one]].name != CONSTANT
            }
            made = sum(self.made_by(operator)) + operator.workspace
            most = max(most, sum(self.nbytes[one] for one in inputs) + made)
        return most

    @cached_property
    def core(self) -> Any:
        """Return the form that `core/paper/semantics.h` uses, once this is complete. Raises CannotBuild."""
        return load().Schedule(self.nbytes, self.storage_of, self.roots, self.operators, CONSTANT)

    @cached_property
    def step(self) -> WatchedStep:
        """Return what a later step can know about this one, once this is complete."""
        step, place, ages = WatchedStep(), self.storage_of, [0] * len(self.nbytes)
        for age, one in enumerate(self.operators, 1):
            for tensor in one.outputs:
                if not self.is_alias(tensor):
                    ages[place[tensor]] = age
            used = [(ages[place[tensor]], self.nbytes[place[tensor]]) for tensor in one.inputs]
            step.add(age, one.name, one.cost, used, self.made_by(one))
        step.use([(ages[place[tensor]], self.nbytes[place[tensor]]) for tensor in self.outputs])
        return step

    def made_by(self, operator: Operator) -> list[int]:
        """Return the bytes of each storage that a call makes."""
        return [self.nbytes[self.storage_of[one]] for one in operator.outputs if not self.is_alias(one)]

    def is_alias(self, tensor: int) -> bool:
        return self.roots[self.storage_of[tensor]] != tensor


def read_schedule(path: str | Path) -> Schedule:
    """Read the schedule of a log file. Raises LogError, OSError."""
    return schedule_of(read_log(path), str(path))


def schedule_of(instructions: Iterable[Instruction], name: str) -> Schedule:
    """Resolve the names of a log. Raises LogError if it refers to an unknown tensor."""
    return _References(name).go(instructions)


class _References:
    """The reference layer: which tensor each name refers to, and how many names refer to each storage."""

    def __init__(self, name: str) -> None:
        self.schedule = Schedule(Path(name).stem)
        self._name = name
        self._tensors: dict[str, int] = {}
        self._by_tensor: list[int] = []
        self._by_storage: list[int] = []
        self._where = ""

    def go(self, instructions: Iterable[Instruction]) -> Schedule:
        schedule = self.schedule
        for number, one in enumerate(instructions, 1):
            self._where = f"{self._name}, instruction {number} ({type(one).__name__.upper()})"
            if isinstance(one, Call):
                self._call(one)
            elif isinstance(one, Release):
                if one.name in self._tensors:  # tensors made before START are not counted
                    self._drop(self._tensors[one.name])
            elif isinstance(one, Copy):
                self._new(one.target)
                tensor = self._tensors[one.target] = self._find(one.source)
                self._hold(tensor)
            elif isinstance(one, Constant):
                self._enter(CONSTANT, (), (one.name,), (one.nbytes,), (-1,), 0)
            elif isinstance(one, Mutate):
                self._mutate(one)
            elif isinstance(one, CopyFrom):
                old, tensor = self._find(one.target), self._find(one.source)
                self._hold(tensor)
                self._tensors[one.target] = tensor
                self._drop(old)
            elif isinstance(one, Annotate) and one.text == BACKWARD and schedule.backward is None:
                schedule.backward = len(schedule.events)
        schedule.outputs = [one for one in self._tensors.values() if self._by_tensor[one]]
        return schedule

    def _call(self, one: Call) -> None:
        inputs = tuple([self._find(name) for name in one.inputs])
        for name in one.outputs:
            self._new(name)
        self._enter(one.operator, inputs, one.outputs, one.nbytes, one.aliases, one.cost)

    def _mutate(self, one: Mutate) -> None:
        """op(t) becomes t' = op(t), t = t': a new storage replaces the old one."""
        schedule = self.schedule
        inputs = tuple([self._find(name) for name in one.inputs])
        sizes = tuple([schedule.nbytes[schedule.storage_of[inputs[place]]] for place in one.mutated])
        names = tuple([one.inputs[place] for place in one.mutated])
        if not names:
            raise LogError(f"{self._where}: mutates nothing")
        self._enter(one.operator, inputs, names, sizes, (-1,) * len(names), one.cost)
        for place in one.mutated:
            self._drop(inputs[place])

    def _enter(
        self,
        operator: str,
        inputs: tuple[int, ...],
        names: tuple[str, ...],
        nbytes: tuple[int, ...],
        aliases: tuple[int, ...],
        cost: int,
    ) -> None:
        schedule = self.schedule
        outputs: list[int] = []
        for name, size, alias in zip(names, nbytes, aliases, strict=True):
            tensor = len(schedule.storage_of)
            outputs.append(tensor)
            if alias < 0:
                schedule.storage_of.append(len(schedule.nbytes))
                schedule.nbytes.append(size)
                schedule.roots.append(tensor)
                self._by_storage.append(0)
            else:
                schedule.storage_of.append(schedule.storage_of[inputs[alias]])
            schedule.operator_of.append(len(schedule.operators))
            self._by_tensor.append(0)
            self._hold(tensor)
            self._tensors[name] = tensor
        schedule.events.append(len(schedule.operators))
        schedule.operators.append(Operator(operator, inputs, tuple(outputs), cost))

    def _find(self, name: str) -> int:
        try:
            return self._tensors[name]
        except KeyError:
            raise LogError(f"{self._where}: there is no tensor {name}") from None

    def _new(self, name: str) -> None:
        if name in self._tensors:
            raise LogError(f"{self._where}: there is a tensor {name} already")

    def _hold(self, tensor: int) -> None:
        self._by_tensor[tensor] += 1
        self._by_storage[self.schedule.storage_of[tensor]] += 1

    def _drop(self, tensor: int) -> None:
        storage = self.schedule.storage_of[tensor]
        if not self._by_tensor[tensor]:
            raise LogError(f"{self._where}: released more often than referred to")
        self._by_tensor[tensor] -= 1
        self._by_storage[storage] -= 1
        if not self._by_storage[storage]:
            self.schedule.events.append(~storage)
