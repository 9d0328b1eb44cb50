"""Replay of a schedule under a budget, with the paper's semantics (App. C.4 and C.5).

A view is destroyed with its storage's memory and has to be recomputed like any other tensor. Memory is the
sum of the storages, without an allocator; the clock is the sum of the costs of what was run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from dtrrun.core.foresight import LOOKED_AT, Foresight, Made, WatchedStep
from dtrrun.core.pool import Policy

from .nodes import Op, Storage, Tensor
from .schedule import CONSTANT, Schedule


class Stopped(Exception):
    """Raised when the replay cannot go on; `status` says why."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Outcome:
    """status: ok, oom (nothing is left to evict) or thrash (over the time limit). Times in ns."""

    status: str
    time: int
    """Time of all operators run, until the end or the failure."""
    plain_time: int
    peak_bytes: int
    evictions: int
    rematerializations: int
    evaluations: int
    seconds: float
    """Duration of the replay."""
    accesses: int | None = field(default=None, kw_only=True)
    """Storage accesses of the policy (App. D.3), if they were counted."""
    chosen: int = field(default=0, kw_only=True)
    """Evictions that made room; the others are deallocations."""

    @property
    def overhead(self) -> float:
        return self.time / self.plain_time if self.plain_time else 1.0


Observer = Callable[[str, "Storage"], None]
"""Called with "evict" or "compute", and the storage whose memory was freed or allocated."""


class Replay:
    """One run of a schedule. Eager eviction: a storage's memory is freed with its last reference."""

    def __init__(
        self,
        schedule: Schedule,
        budget_bytes: int | None,
        policy: Policy[Storage],
        *,
        limit: float = 2.0,
        requeue: bool = False,
        observer: Observer | None = None,
        previous: WatchedStep | None = None,
    ) -> None:
        """limit: multiple of the plain run's time; a run that recomputes more ends as `thrash` (Sec. 4.2).

        requeue: reinsert storages into the pool after they were locked, as in the paper; this only affects
        ties. previous: the previous step, known to a heuristic with foresight.
        """
        self.schedule = schedule
        self.budget = budget_bytes
        self.policy = policy
        self.memory = self.peak_bytes = 0
        self.clock = 0
        self.evictions = self.chosen = self.rematerializations = 0
        self.recomputed = 0
        self._plain_time = schedule.cost
        self._limit = (limit - 1) * self._plain_time if limit < inf else inf
        self._observer = observer
        self._requeue = requeue
        self.age = 0
        self._recent: deque[Made] = deque(maxlen=LOOKED_AT)
        if policy.heuristic.foresight:
            policy.foresight = Foresight(self, [] if previous is None else [previous])
        self._build()

    def _build(self) -> None:
        schedule = self.schedule
        self.storages = [Storage(nbytes) for nbytes in schedule.nbytes]
        self.tensors = [
            Tensor(self.storages[place], 0 if schedule.is_alias(tensor) else schedule.nbytes[place])
            for tensor, place in enumerate(schedule.storage_of)
        ]
        tensors = self.tensors
        self.operators = [
            Op(
                one.name,
                one.cost,
                [tensors[i] for i in one.inputs],
                [tensors[i] for i in one.outputs],
                one.workspace,
            )
            for one in schedule.operators
        ]

    def run(self) -> Outcome:
        started = perf_counter()
        status = "ok"
        try:
            operators, storages = self.operators, self.storages
            for event in self.schedule.events:
                if event >= 0:
                    self.call(operators[event])
                else:
                    self.released(storages[~event])
            for tensor in self.schedule.outputs:
                self.keep(self.tensors[tensor])
        except Stopped as stopped:
            status = stopped.status
        return Outcome(
            status,
            self.clock,
            self._plain_time,
            self.peak_bytes,
            self.evictions,
            self.rematerializations,
            self.policy.score_evaluations,
            perf_counter() - started,
            chosen=self.chosen,
        )

    def take_apart(self) -> None:
        """Break reference cycles, so that no garbage collection is needed."""
        self.policy.foresight = None
        for op in self.operators:
            op.inputs.clear()
            op.outputs.clear()
        for storage in self.storages:
            storage.tensors.clear()
            storage.inputs.clear()

    def call(self, op: Op) -> None:
        """Run an operator of the program itself."""
        inputs = op.inputs
        for output in op.outputs:
            self._enter(output, op)
        for one in inputs:
            if not one.defined:
                self._materialize(op)
                break
        else:  # all resident, as in most calls
            clock = self.clock
            for one in inputs:
                storage = one.storage
                storage.last_access = clock
                storage.locks += 1
            self._compute(op, op.outputs[0])
            self._unlock(inputs)
        clock = self.clock
        self.age += 1
        for output in op.outputs:
            output.storage.last_access = clock
        if self.policy.foresight is not None:
            self._note_made(op)
        if op.name == CONSTANT:
            storage = op.outputs[0].storage
            storage.constant = storage.pinned = True
            storage.locks += 1
            self.policy.discard(storage)

    def _note_made(self, op: Op) -> None:
        for output in op.outputs:
            storage = output.storage
            if storage.tensors[0] is output:
                storage.age = self.age
                self._recent.appendleft((self.age, op.name, storage.nbytes))

    def made_last(self) -> Iterator[Made]:
        """For `core.foresight`."""
        return iter(self._recent)

    def _enter(self, output: Tensor, op: Op) -> None:
        """Enter a new tensor: its storage's cost and dependencies grow by its operator's (App. C.2)."""
        storage = output.storage
        tensors = storage.tensors
        if not tensors or tensors[-1].operator is not op:  # one operator's outputs are consecutive
            storage.cost += op.cost
        tensors.append(output)
        known = storage.inputs
        for one in op.inputs:
            source = one.storage
            if source is not storage and not source.constant and source not in known:
                known.append(source)
        if storage.resident:
            self.policy.cost_changed(storage)

    def released(self, storage: Storage) -> None:
        """The program's last reference has been released (App. C.5)."""
        storage.released = True
        if storage.resident and not storage.pinned:
            self._evict(storage)

    def keep(self, tensor: Tensor) -> None:
        """Output condition (App. C.6): what is alive at the end must be resident, and stay."""
        if not tensor.defined:
            self._materialize(tensor.operator, tensor)
        storage = tensor.storage
        if not storage.pinned:
            storage.pinned = True
            storage.locks += 1
            self.policy.discard(storage)

    def _materialize(self, op: Op, wanted: Tensor | None = None) -> None:
        """Run `op` after rematerializing its inputs, with an explicit stack.

        wanted: the output that is needed, None for the program's own call.
        """
        stack = [self._frame(op, wanted or op.outputs[0])]
        while stack:
            op, tensor, missing = stack[-1]
            while missing:
                source = missing[-1]
                if not source.defined:  # a sibling's rematerialization may have brought it back
                    stack.append(self._frame(source.operator, source))
                    break
                source.storage.locks += 1
                missing.pop()
            else:
                stack.pop()
                again = bool(stack) or wanted is not None
                self._compute(op, tensor, again=again)
                self._unlock(op.inputs)

    def _unlock(self, inputs: list[Tensor]) -> None:
        for one in inputs:
            storage = one.storage
            storage.locks -= 1
            if self._requeue and not storage.locks:
                self.policy.discard(storage)
                self.policy.insert(storage)

    def _frame(self, op: Op, tensor: Tensor) -> tuple[Op, Tensor, list[Tensor]]:
        """Return the operator, the output that is needed, and the inputs to rematerialize, the first one
        last."""
        clock = self.clock
        missing: list[Tensor] = []
        for one in op.inputs:
            storage = one.storage
            storage.last_access = clock
            if one.defined:
                storage.locks += 1
            else:
                missing.append(one)
        missing.reverse()
        return op, tensor, missing

    def _compute(self, op: Op, wanted: Tensor, again: bool = False) -> None:
        need = self.memory + op.peak_bytes
        if self.budget is not None and need > self.budget:
            self._make_room(op.peak_bytes)
            need = self.memory + op.peak_bytes
        self.clock += op.cost
        self.memory += op.nbytes
        if need > self.peak_bytes:
            self.peak_bytes = need
        outputs = op.outputs
        if len(outputs) > 1:  # the needed output is made last
            outputs = [one for one in outputs if one is not wanted] + [wanted]
        for one in outputs:
            if one.defined:
                self.memory -= one.nbytes  # recomputed needlessly: freed at once
                continue
            one.defined = True
            storage = one.storage
            if not storage.resident:
                storage.resident = True
                if again:
                    self.policy.rematerialized(storage)
                self.policy.insert(storage)
                if self._observer is not None:
                    self._observer("compute", storage)
        if again:
            self.rematerializations += 1
            self.recomputed += op.cost
            if self.recomputed > self._limit:
                raise Stopped("thrash")

    def _make_room(self, nbytes: int) -> None:
        assert self.budget is not None
        while self.memory + nbytes > self.budget:
            victim = self.policy.select(self.clock, _unlocked)
            if victim is None:
                raise Stopped("oom")
            self.chosen += 1
            self._evict(victim)

    def _evict(self, storage: Storage) -> None:
        storage.resident = False
        self.evictions += 1
        self.memory -= storage.nbytes
        for tensor in storage.tensors:
            tensor.defined = False
        self.policy.evicted(storage)
        if self._observer is not None:
            self._observer("evict", storage)


def _unlocked(storage: Storage) -> bool:
    return not storage.locks
