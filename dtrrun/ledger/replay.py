"""Rematerialization: running recorded operators again (paper, Sec. 2 and App. C.4).

With an explicit stack, so that a chain of ten thousand evicted operators is no RecursionError. What is in
memory is locked while an operator waits for its other inputs; what has been recomputed, until the last
operator of this replay has read it, so that nothing is recomputed twice as long as memory suffices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from dtrrun.ledger.foreign import LOST, LostError
from dtrrun.ledger.ledger import Ledger
from dtrrun.ledger.locks import unlock
from dtrrun.ledger.record import Blank, Op, Record

MAX_RELAXATIONS = 8  # in one replay: two inputs that never fit together must not take turns forever
LAST_PLANNED = 5  # relaxations that are left when plans are made for the last time

Plan = dict[int, tuple[Record, list[Record]]]
"""By id of each operator that a replay is going to run: a record that it makes, and inputs locked for it."""


class Entered:
    """An operator that is going to run, and how many of its inputs have been locked and unlocked so far."""

    __slots__ = ("locked", "op", "record", "unlocked")

    def __init__(self, record: Record, op: Op) -> None:
        self.record, self.op = record, op  # the record that is wanted of it
        self.locked = self.unlocked = 0


class Replay:
    """Brings evicted records back; counts what that cost."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.rematerializations = 0
        self.rematerialized_bytes = 0
        self.operators_ns = 0  # of recomputed operators alone
        self.by_operator: dict[str, list[int]] = {}  # name: [count, ns, bytes]
        self.sparing: Op | None = None  # what is run without its workspace, rather than not at all
        self.noted: Callable[[Record, Op, int], None] | None = None  # told of each operator, and its ns
        self._came_back: list[tuple[Op, tuple[Any, ...]]] = []  # ran, and what was kept for it

    def lock(self, records: list[Record], taken: list[Record] | None = None) -> None:
        """Lock records and bring back those that are evicted; on failure nothing stays locked.

        taken: has what is locked so far, for whoever is to unlock it.
        """
        clock = self.ledger.clock
        if taken is None:
            taken = []
        try:
            for record in records:
                record.locks += 1
                taken.append(record)
                record.last_access = clock
            if any(not record.resident for record in records):
                self.materialize(records)
        except BaseException:
            unlock(taken)
            raise

    def materialize(self, targets: Iterable[Record]) -> None:
        """Make all targets resident. The caller has locked those that must stay together.

        Raises BudgetError if the budget can't hold what a replay needs; all locks taken here are released.
        """
        stack: list[Record | Op] = [record for record in targets if not record.resident]
        entered: list[Entered] = []
        plan: Plan = {}
        relaxations = MAX_RELAXATIONS
        self.ledger.replaying += 1
        try:
            guard = self.below()
            with guard, guard:  # twice, for the sake of interrupts
                while stack:
                    record = stack[-1]
                    if isinstance(record, Op):
                        stack.pop()
                        if id(record) in plan:  # it has not run yet
                            stack.append(plan[id(record)][0])
                        continue
                    waiting = bool(entered) and entered[-1].record is record
                    if record.resident:
                        stack.pop()
                        if waiting:
                            self._unplan(plan, entered[-1].op)
                            self._leave(entered[-1])
                            del entered[-1]
                        continue
                    op = record.op
                    if op is None:
                        if record.pin == LOST:
                            raise LostError
                        raise AssertionError("dtrrun: a storage was evicted that can't be recomputed")
                    if not waiting:
                        if id(op) not in plan and relaxations >= LAST_PLANNED:
                            # In the program's order: then as little is needed at a time as when it ran.
                            stack.extend(_add_to(plan, record))
                            if stack[-1] is not record:
                                continue
                        entered.append(Entered(record, op))
                        self._enter(entered[-1])
                    if self.ledger.dead:
                        self.ledger.drain()
                    missing = [source for source in op.inputs if not source.resident]
                    if missing:
                        stack.extend(reversed(missing))
                        continue
                    self._unplan(plan, op)
                    try:
                        self._run(record, op)
                    except self.ledger.BudgetError:
                        if (len(entered) < 2 and not plan) or not relaxations:
                            if not op.signature.workspace or self.sparing is op:
                                raise
                            self.sparing = op  # its library does without, if it must
                            continue
                        # What is needed later need not be held yet: it can come back in its turn.
                        relaxations -= 1
                        self._give_up(plan)
                        for outer in entered[:-1]:
                            self._back_out(outer)
                        del entered[:-1]
                        continue
                    stack.pop()
                    self._leave(entered[-1])
                    del entered[-1]
                    if op.kept:
                        self._came_back.append((op, op.kept))
        finally:
            try:
                self._abandon(plan, entered)
            except BaseException:  # an interrupt
                self._abandon(plan, entered)
                raise
            finally:
                self.sparing = None
                self.ledger.replaying -= 1
            if self._came_back and not self.ledger.replaying:
                self._let_go()

    def _abandon(self, plan: Plan, entered: list[Entered]) -> None:
        """Unlock all that is still locked; nothing is if the replay has run to its end."""
        self._give_up(plan)
        while entered:
            self._leave(entered[-1])
            del entered[-1]

    def _enter(self, entered: Entered) -> None:
        """Lock an operator's inputs. A function, so that no variable goes on referring to the last one."""
        inputs, clock = entered.op.inputs, self.ledger.clock
        while entered.locked < len(inputs):
            source = inputs[entered.locked]
            source.locks += 1
            entered.locked += 1
            source.last_access = clock

    def _let_go(self) -> None:
        """What inputs were kept for is back, and no replay goes on that may read them: they may die.

        What was evicted again meanwhile has others kept for it.
        """
        for op, kept in self._came_back:
            if op.kept is kept:
                op.kept = ()
        self._came_back.clear()
        del op, kept
        self.ledger.drain()

    @staticmethod
    def _unplan(plan: Plan, op: Op) -> None:
        """The turn of an operator has come: `materialize` has locked its inputs, or needs it no more."""
        if id(op) in plan:
            unlock(plan[id(op)][1])
            del plan[id(op)]

    def _give_up(self, plan: Plan) -> None:
        for _, sources in plan.values():
            self._unlock(sources)
        plan.clear()

    def _unlock(self, sources: list[Record]) -> None:
        """Unlock what was planned for operators that have not run."""
        sources.reverse()
        while sources:
            source = sources[-1]
            source.locks -= 1
            del sources[-1]
            self._idle(source)

    def _back_out(self, entered: Entered) -> None:
        """Unlock the inputs of an operator that has not run, and that has to lock them again."""
        while entered.unlocked < entered.locked:
            source = entered.op.inputs[entered.unlocked]
            source.locks -= 1
            entered.unlocked += 1
            self._idle(source)

    def _idle(self, source: Record) -> None:
        if source.held is not None and not source.locks and self.ledger.pressure:
            self.ledger.policy.insert(source)

    def _leave(self, entered: Entered) -> None:
        """Unlock the inputs of an operator; let go of those that were recomputed for it alone."""
        op = entered.op
        while entered.unlocked < entered.locked:
            source = op.inputs[entered.unlocked]
            source.locks -= 1
            entered.unlocked += 1
            if source.held is None or source.locks:
                continue
            # References: the loop's variable, getrefcount's argument, the ledger's table.
            if sys.getrefcount(source) - 3 > _references_from(op, source):
                # Another recipe may read it: keep it while there is room.
                if self.ledger.pressure:
                    self.ledger.policy.insert(source)
            else:  # App. C.4: ephemeral tensors go at once
                self.ledger.drop(source)
                self.ledger.policy.released(source)
        if self.ledger.held:
            self.ledger.trim()

    def _run(self, wanted: Record, op: Op) -> None:
        ledger = self.ledger
        need = op.signature.output_bytes
        if self.sparing is op:
            need -= op.signature.workspace
        if ledger.memory.REFILL_COPIES:
            need += wanted.nbytes
        mutated = _mutated(op)
        stolen: list[Record] = []  # old versions that only this operator reads: it may write into them
        seen: set[int] = set()
        for entry in op.tensors:
            if type(entry) is Blank:
                need += entry.nbytes
            elif id(entry) in mutated and id(entry) not in seen:
                seen.add(id(entry))
                # References: the loop's variable, getrefcount's argument, the ledger's table.
                alone = sys.getrefcount(entry) - 3 <= _references_from(op, entry)
                if entry.held is not None and entry.locks == 1 and alone:
                    stolen.append(entry)
                else:
                    need += entry.nbytes
        ledger.make_room(need, op.signature.operator.name)
        for source in op.inputs:
            if source.exposed and not ledger.foreign.unchanged(source):
                raise LostError
        results, targets, cost = self.execute(op, mutated, stolen)
        self.operators_ns += cost
        ledger.clock += op.signature.cost
        self._collect(wanted, op, results, targets)
        for source in stolen:  # only now: nothing that is evicted depends on it any more
            ledger.policy.released(source)
        tally = self.by_operator.setdefault(op.signature.operator.name, [0, 0, 0])
        tally[0] += 1
        tally[1] += cost
        tally[2] += wanted.nbytes
        if self.noted is not None:
            self.noted(wanted, op, cost)

    def below(self) -> AbstractContextManager[None]:
        """Where operators are run again: nothing of the program's sees them."""
        raise NotImplementedError

    def execute(self, op: Op, mutated: set[int], stolen: list[Record]) -> tuple[Any, list[Any], int]:
        """Run an operator again: its results, the storages under its holes, and the time it took in ns.

        mutated: ids of the records that it writes to; of these, `stolen` may be written to themselves.
        """
        raise NotImplementedError

    def _take(self, source: Record) -> Any:
        """The memory of an old version, to be accounted for as the new one."""
        storage = source.held
        assert storage is not None
        self.ledger.drop(source)
        self.ledger.policy.discard(source)
        return storage

    def _collect(self, wanted: Record, op: Op, results: Any, targets: list[Any]) -> None:
        """Give the results of a replay to the records that miss them; drop the others."""
        memory = self.ledger.memory
        made: list[tuple[Record, Any]] = []
        if op.outputs is None:
            made.append((wanted, memory.storage_of(results[0])))
        else:
            for where, reference in op.outputs:
                record = reference()
                if record is None or record.resident:
                    continue
                storage = targets[~where] if where < 0 else memory.storage_of(results[where])
                assert storage is not None
                made.append((record, storage))
        ledger = self.ledger
        transient = ledger.resident_bytes + (op.signature.output_bytes)
        ledger.note_peak(transient)
        for record, storage in made:
            if not memory.holds(storage, record.nbytes):
                raise AssertionError(
                    f"dtrrun: internal error: {op.signature.operator.name}, run again, made "
                    f"{memory.size_of(storage)} bytes in place of {record.nbytes}"
                )
            if record.alive:
                emptied = record.memory()
                try:
                    memory.refill(emptied, storage)
                    ledger.restored(record)
                except BaseException:  # an interrupt may come when it has its memory
                    if not record.resident and memory.size_of(emptied):
                        ledger.restored(record)
                    raise
            elif record is wanted or record.locks:
                ledger.hold(record, storage)
            else:
                continue
            self.rematerializations += 1
            self.rematerialized_bytes += record.nbytes
            record.last_access = ledger.clock
            if ledger.pressure:
                ledger.policy.rematerialized(record)
                if record.held is None and record.nbytes >= ledger.least_bytes:
                    ledger.policy.insert(record)


def _add_to(plan: Plan, wanted: Record) -> list[Op]:
    """Plan what has to be run to make `wanted`: the operators, the last of the program's order first.

    Locks what they will make for one another, each until all of these have read it. So everything is
    recomputed once: else what two operators read can be evicted between the two, at every depth again.
    """
    planned: list[Op] = []
    pending = [wanted]
    plan[id(wanted.op)] = wanted, []
    while pending:
        record = pending.pop()
        op = record.op
        assert op is not None
        locked = plan[id(op)][1]
        if record is not wanted:
            planned.append(op)
        for source in op.inputs:
            if source.resident or source.op is None:
                continue
            source.locks += 1
            locked.append(source)
            if id(source.op) not in plan:
                plan[id(source.op)] = source, []
                pending.append(source)

    def order(op: Op) -> tuple[int, int]:
        record, _ = plan[id(op)]
        return record.age, record.version

    planned.sort(key=order, reverse=True)
    return planned


def _references_from(op: Op, source: Record) -> int:
    """How often one recipe refers to a record."""
    references = sum(1 for entry in op.tensors if entry is source)
    if op.inputs is not op.tensors:
        references += sum(1 for record in op.inputs if record is source)
    return references


def _mutated(op: Op) -> set[int]:
    """Ids of the input records whose storage the operator writes to."""
    if op.outputs is None:
        return set()
    return {id(op.tensors[~where]) for where, _ in op.outputs if where < 0}
