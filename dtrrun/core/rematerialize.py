"""Rematerialization: running recorded operations again (paper, Sec. 2 and App. C.4).

It uses an explicit stack, so a chain of ten thousand evicted operations raises no RecursionError. The
operations to run are planned first, and run in the program's order. Resident inputs are locked while an
operation waits for its other inputs; recomputed ones are locked until the last operation of the plan has read
them. So nothing is recomputed twice while memory suffices, and a rematerialization costs the sum of its
recipes, as the paper's c(t) assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns as now_ns
from typing import Any, NoReturn

from dtrrun.core.backend import Executor, Shortcuts
from dtrrun.core.deallocation import Deallocation
from dtrrun.core.evict import Eviction
from dtrrun.core.foreign import LOST, LostError
from dtrrun.core.frugal import bring_back, fit_one_by_one
from dtrrun.core.graph import Operation, Overwritten, Version, read_by_others
from dtrrun.core.ledger import Ledger
from dtrrun.core.locks import unlock
from dtrrun.core.observer import RESTORES
from dtrrun.core.recipes import Recipes

MAX_RELAXATIONS = 10  # per rematerialization, or inputs that never fit together would alternate forever
LAST_PLANNED = 7  # number of relaxations left when the last plan is made
MOST_ALONE = 4  # operations without a plan, for each of the first plan's, and `FEW_ALONE` more
FEW_ALONE = 64
TURNED = 6  # number left when inputs that did not fit in one order are brought back in the other, once

Plan = dict[int, tuple[Version, list[Version]]]
"""By id of each operation to be run: a version that it makes, and the inputs locked for it."""


class Entered:
    """An operation about to run, with the numbers of its inputs locked and unlocked so far."""

    __slots__ = ("locked", "operation", "unlocked", "version")

    def __init__(self, version: Version, operation: Operation) -> None:
        self.version, self.operation = version, operation  # the version that is needed
        self.locked = self.unlocked = 0


class Rematerializer:
    """Brings evicted versions back, and counts the cost."""

    __slots__ = (
        "__dict__",
        "began",
        "operators_ns",
        "rematerializations",
        "rematerialized_bytes",
    )  # what the native extension writes

    def __init__(
        self,
        ledger: Ledger,
        recipes: Recipes,
        deallocation: Deallocation,
        eviction: Eviction,
        executor: Executor,
        *,
        out_of_memory: type[Exception],
        between: Callable[[], None] | None = None,
        shortcuts: Shortcuts | None = None,
    ) -> None:
        """out_of_memory: the errors that a rematerialization may raise, including the budget error.

        between: called after each operation that was run again.
        """
        self._ledger, self._foreign = ledger, recipes.foreign
        self._deallocation, self._eviction, self._executor = deallocation, eviction, executor
        self._out_of_memory = out_of_memory
        self._between = between
        self._shortcuts = shortcuts
        self.at_once = False  # whether what finds no room is left to it at once: so it was needed before
        self.rematerializations = 0
        self.rematerialized_bytes = 0
        self.operators_ns = 0  # time in recomputed operators only
        self.by_operator: dict[str, list[int]] = {}  # name: [count, ns, bytes]
        self._without_workspace: Operation | None = None  # what may run without workspace
        self.began: tuple[int, int] | None = None  # the one in progress, and the time counted before

    # -- what is asked for -----------------------------------------------------------------------

    def lock(self, versions: Sequence[Version], taken: list[Version] | None = None) -> None:
        """Lock versions and bring back those that are evicted. On failure nothing stays locked.

        taken: receives the versions locked so far, for the caller to unlock. Raises the budget error.
        """
        clock = self._ledger.clock
        if taken is None:
            taken = []
        resident = True
        try:
            for version in versions:
                version.locks += 1
                taken.append(version)
                version.last_access = clock
                resident = resident and version.resident
            if not resident:
                self.materialize(versions)
        except BaseException:
            unlock(taken)
            raise

    def restore(self, version: Version) -> bool:
        """Bring an evicted version back if there is room. Returns whether there was."""
        try:
            self.materialize((version,), locked=False)
        except (self._out_of_memory, AssertionError, LostError):
            return False
        return True

    def restore_all(self, *, fitting: bool = False) -> list[Version]:
        """Bring back everything that the program still has. Returns what could not be brought back.

        fitting: until it takes the place of something else.
        """
        ledger, before = self._ledger, self._eviction.evictions
        for observer in ledger.observers:
            observer.period(RESTORES, fitting=fitting)
        lost = []
        for version in list(ledger.versions.values()):
            if version.alive and not version.resident:
                room = ledger.resident_bytes + version.nbytes <= ledger.limit
                fits = room and self._eviction.evictions == before
                if not ((fits or not fitting) and self.restore(version)):
                    lost.append(version)
        return lost

    def materialize(self, targets: Sequence[Version], *, locked: bool = True) -> None:
        """Make all targets resident. locked: whether the caller has locked them.

        Raises the budget error if the budget can't hold what a recipe needs. Locks taken here are released.
        """
        if self.began is not None:  # nested: an operation that makes room
            self._materialize(targets)
            return
        self.began = now_ns(), self._accounted()
        before = self._ledger.clock
        places = [place for place in range(len(targets)) if not targets[place].resident]
        try:
            self._executor.quietly(self._bring_back, targets, locked)
        finally:
            self.began = None
        self._learn_costs(targets, places, self._ledger.clock - before)

    @staticmethod
    def _learn_costs(targets: Sequence[Version], places: Sequence[int], cost: int) -> None:
        """What it has cost to bring these back is what they cost from now on, if that is more.

        A cost is known only as far as what is evicted at that moment. A gradient whose inputs are in memory
        looks cheap; once these have gone as well, and there is no room for the rest of the backward pass, it
        takes many times the sum of its recipes. It would be evicted again and again, and the step not end.

        places: of those that were brought back. cost: of all of them together, ns.
        """
        for place in places:
            version = targets[place]
            version.cost = max(version.cost, cost // len(places))

    def _bring_back(self, targets: Sequence[Version], locked: bool) -> None:
        error = self._error_of(targets)
        if error is not None and not self.frugally(targets, locked=locked):
            raise error

    def _error_of(self, targets: Sequence[Version]) -> Exception | None:
        """Bring the targets back. Returns the budget error, without frames: they hold references to versions,
        which are counted."""
        try:
            if not self._natively(targets):
                self._materialize(targets)
        except self._eviction.BudgetError as failure:
            error: Exception = failure
            error.__traceback__ = None
            return error
        return None

    def frugally(self, targets: Sequence[Version], *, locked: bool = True) -> bool:
        """Bring back what did not fit, in as little memory as possible. Returns whether that was possible."""
        done: bool = self._executor.quietly(self._frugally, targets, locked)
        return done

    def _frugally(self, targets: Sequence[Version], locked: bool) -> bool:
        eviction = self._eviction
        eviction.replaying += 1
        try:
            guard = self._executor.below()
            with guard, guard:  # twice, because of interrupts
                done = bring_back(self._ledger, self._deallocation, eviction, self, targets, locked=locked)
                self.at_once = self.at_once or done
                return done
        finally:
            eviction.replaying -= 1
            if not eviction.replaying:
                self._deallocation.release_kept_inputs()

    def ends_at_once(self, targets: Sequence[Version]) -> bool:
        """Return whether a rematerialization that finds no room shall not be tried again in the same way.

        That is so if it can't succeed in any way, or if one before it needed another way.
        """
        return self.at_once or not fit_one_by_one(self._ledger, targets)

    def needs(self, wanted: Version, operation: Operation) -> int:
        """Return the bytes that a run of an operation needs whose inputs are locked, without a workspace."""
        return self._needs(wanted, operation, operation.mutated())[0] - operation.signature.workspace

    def run_with_room(self, wanted: Version, operation: Operation) -> bool:
        """Run an operation whose inputs are locked; if there is too little room, without a workspace.

        Returns False if an input has gone. Raises the budget error.
        """
        try:
            try:
                done = self._run(wanted, operation)
            except self._eviction.BudgetError:
                if not operation.signature.workspace:
                    raise
                self._without_workspace = operation
                done = self._run(wanted, operation)
        finally:
            self._without_workspace = None
        if done and self._between is not None:
            self._between()
        return done

    def _natively(self, targets: Sequence[Version]) -> bool:
        return self._shortcuts is not None and self._shortcuts.materialize(targets)

    def _accounted(self) -> int:
        return self.operators_ns + self._eviction.making_room_ns

    def under_way_ns(self) -> int:
        """Bookkeeping time of the current rematerialization, which is counted only at its end."""
        began = self.began
        if began is None:
            return 0
        started, accounted = began
        return now_ns() - started - (self._accounted() - accounted)

    # -- the plan --------------------------------------------------------------------------------

    def _materialize(self, targets: Sequence[Version]) -> None:
        ledger, eviction, operations = self._ledger, self._eviction, self._ledger.graph.operation
        # Of versions, and operations that are planned.
        stack: list[Any] = [version for version in targets if not version.resident]
        entered: list[Entered] = []
        plan: Plan = {}
        relaxations = MAX_RELAXATIONS
        planned = alone = 0  # operations of the first plan; those that have run since plans were given up
        error: Exception | None = None
        eviction.replaying += 1
        try:
            guard = self._executor.below()
            with guard, guard:  # twice, because of interrupts
                while stack:
                    version = stack[-1]
                    if isinstance(version, operations):
                        stack.pop()
                        if id(version) in plan:  # it has not run yet
                            stack.append(plan[id(version)][0])
                        continue
                    waiting = bool(entered) and entered[-1].version is version
                    if version.resident:
                        stack.pop()
                        if waiting:
                            self._unplan(plan, entered[-1].operation)
                            self._leave(entered[-1])
                            del entered[-1]
                        continue
                    operation = version.operation
                    if operation is None:
                        self.refuse(version)
                    if not waiting:
                        if id(operation) not in plan and relaxations >= LAST_PLANNED:
                            # In the program's order, which needs as little memory at a time as the original
                            # run.
                            stack.extend(_add_to(plan, version))
                            planned = planned or len(plan)
                            if stack[-1] is not version:
                                continue
                        entered.append(Entered(version, operation))
                        self._enter(entered[-1])
                    if ledger.dead:
                        ledger.collect_dead()
                    missing = [source for source in operation.inputs if not source.resident]
                    if missing:
                        turned = relaxations == TURNED
                        stack.extend(missing if turned else reversed(missing))
                        continue
                    self._unplan(plan, operation)
                    if relaxations < LAST_PLANNED and error is not None:
                        alone += 1
                        if alone > MOST_ALONE * planned + FEW_ALONE:
                            raise error  # it could take exponentially long: `frugally` is better
                    try:
                        if not self._run(version, operation):
                            continue  # an input has gone
                        if self._between is not None:
                            self._between()
                    except eviction.BudgetError as failure:
                        failure.__traceback__ = None  # whose frames hold references
                        error = failure
                        if relaxations == MAX_RELAXATIONS and self.ends_at_once(targets):
                            raise
                        if (len(entered) < 2 and not plan) or not relaxations:
                            if not operation.signature.workspace or self._without_workspace is operation:
                                raise
                            self._without_workspace = operation  # the library can do without it
                            continue
                        # What is needed only later need not be locked yet and can be brought back in its
                        # turn.
                        relaxations -= 1
                        self._give_up(plan)
                        self._back_out(entered[:-1])
                        del entered[:-1]
                        continue
                    stack.pop()
                    self._leave(entered[-1])
                    del entered[-1]
                    self._deallocation.came_back(operation)
        finally:
            error = None  # or its frames, this one among them, would hold references
            try:
                self._abandon(plan, entered)
            except BaseException:  # an interrupt
                self._abandon(plan, entered)
                raise
            finally:
                self._without_workspace = None
                eviction.replaying -= 1
            if not eviction.replaying:
                self._deallocation.release_kept_inputs()

    def _abandon(self, plan: Plan, entered: list[Entered]) -> None:
        """Release all remaining locks. There are none if the rematerialization has finished."""
        self._give_up(plan)
        while entered:
            self._leave(entered[-1])
            del entered[-1]

    def _enter(self, entered: Entered) -> None:
        """Lock an operation's inputs.

        This is a function so that no variable keeps a reference to the last one.
        """
        inputs, clock = entered.operation.inputs, self._ledger.clock
        while entered.locked < len(inputs):
            source = inputs[entered.locked]
            source.locks += 1
            entered.locked += 1
            source.last_access = clock

    @staticmethod
    def _unplan(plan: Plan, operation: Operation) -> None:
        """Remove an operation from the plan: `_materialize` has locked its inputs, or no longer needs it."""
        if id(operation) in plan:
            unlock(plan[id(operation)][1])
            del plan[id(operation)]

    def _give_up(self, plan: Plan) -> None:
        for _, sources in plan.values():
            self._unlock(sources)
        plan.clear()

    def _unlock(self, sources: list[Version]) -> None:
        """Unlock inputs planned for operations that have not run."""
        sources.reverse()
        while sources:
            source = sources[-1]
            source.locks -= 1
            del sources[-1]
            self.idle(source)

    def _back_out(self, waiting: list[Entered]) -> None:
        """Unlock the inputs of operations that have not run, and that must lock them again.

        The loop is in a function for the reason given in `_enter`.
        """
        for entered in waiting:
            while entered.unlocked < entered.locked:
                source = entered.operation.inputs[entered.unlocked]
                source.locks -= 1
                entered.unlocked += 1
                self.idle(source)

    def idle(self, source: Version) -> None:
        """A version has been unlocked, before the operation that it was locked for has run."""
        recomputed = source.scratch is not None and source.operation is not None  # and not a copy
        if recomputed and not source.locks and self._ledger.pressure:
            self._ledger.policy.insert(source)

    def _leave(self, entered: Entered) -> None:
        """Unlock the inputs of an operation, and free those that were recomputed for it alone."""
        operation = entered.operation
        while entered.unlocked < entered.locked:
            source = operation.inputs[entered.unlocked]
            source.locks -= 1
            entered.unlocked += 1
            if source.scratch is not None and not source.locks and source.operation is not None:
                others = read_by_others(source, 1, operation)  # not in a call, which adds references
                self._deallocation.was_read(source, others=others)
        if self._ledger.scratch:
            self._deallocation.trim()

    # -- one operation ---------------------------------------------------------------------------

    def run_alone(self, wanted: Version, operation: Operation) -> bool:
        """Run one operation whose inputs are locked, for the native extension.

        Returns False if an input has gone. Raises the budget error.
        """
        done: bool = self._executor.quietly(self._run_below, wanted, operation)
        return done

    def _run_below(self, wanted: Version, operation: Operation) -> bool:
        guard = self._executor.below()
        with guard, guard:  # twice, because of interrupts
            return self._run(wanted, operation)

    @staticmethod
    def refuse(version: Version) -> NoReturn:
        """An evicted version has no recipe. Raises LostError, or AssertionError for an internal error."""
        if version.pin == LOST:
            raise LostError
        raise AssertionError("dtrrun: internal error: an evicted storage cannot be recomputed")

    def _run(self, wanted: Version, operation: Operation) -> bool:
        ledger, signature = self._ledger, operation.signature
        held = self._executor.hold(operation)  # until it has run
        if held is None:
            return False
        mutated = operation.mutated()
        need, given = self._needs(wanted, operation, mutated)
        # An error's traceback holds this frame while locks are released: what it refers to counts as read.
        self._eviction.make_room(need, signature.operator.name)
        self._check_foreign(operation)
        started = now_ns() if ledger.decision_observers else 0
        taken = {id(operation.tensors[place]): self._take(operation.tensors[place]) for place in given}
        results, targets, cost = self._executor.execute(operation, mutated, taken)
        del held
        self.operators_ns += cost
        ledger.clock += signature.cost
        self._collect(wanted, operation, results, targets)
        for place in given:  # only now, when nothing evicted depends on it
            ledger.policy.released(operation.tensors[place])
        tally = self.by_operator.setdefault(signature.operator.name, [0, 0, 0])
        tally[0] += 1
        tally[1] += cost
        tally[2] += wanted.nbytes
        for observer in ledger.decision_observers:
            observer.rematerialized(wanted, operation, started, cost)
        return True

    def _needs(self, wanted: Version, operation: Operation, mutated: set[int]) -> tuple[int, list[int]]:
        """Return the bytes that a run needs, and places of tensors that it may overwrite.

        Those are old versions that only this operation reads.
        """
        need = operation.signature.output_bytes
        if self._without_workspace is operation:
            need -= operation.signature.workspace
        given: list[int] = []
        seen: set[int] = set()
        place = -1  # `enumerate` would hold a reference, and those are counted
        for entry in operation.tensors:
            place += 1
            if type(entry) is Overwritten:
                need += entry.nbytes
            elif id(entry) in mutated and id(entry) not in seen:
                seen.add(id(entry))
                own = entry.scratch is not None and entry.operation is not None and entry.locks == 1
                if own and not read_by_others(entry, 1, operation):
                    given.append(place)
                else:
                    need += entry.nbytes
        return need, given

    def _check_foreign(self, operation: Operation) -> None:
        for source in operation.inputs:
            if source.escaped and not self._foreign.unchanged(source):
                raise LostError

    def _take(self, source: Version) -> Any:
        """Return the memory of an old version, to be accounted for as the new one's."""
        storage = source.scratch
        assert storage is not None
        self._ledger.drop_scratch(source)
        self._ledger.policy.discard(source)
        return storage

    def _collect(self, wanted: Version, operation: Operation, results: Any, targets: list[Any]) -> None:
        """Give the results of an operation to the versions that lack them, and drop the others."""
        ledger, memory = self._ledger, self._ledger.memory
        made: list[tuple[Version, Any]] = []
        for where, version in operation.made(wanted):
            if version.resident:
                continue
            storage = targets[~where] if where < 0 else memory.storage_of(results[where])
            assert storage is not None
            made.append((version, storage))
        ledger.note_peak(ledger.resident_bytes + operation.signature.output_bytes)
        for version, storage in made:
            if not memory.holds(storage, version.nbytes):
                raise AssertionError(
                    f"dtrrun: internal error: {operation.signature.operator.name}, run again, made "
                    f"{memory.size_of(storage)} bytes in place of {version.nbytes}"
                )
            if version.alive:
                emptied = version.memory()
                try:
                    memory.refill(emptied, storage)
                    ledger.restored(version)
                except BaseException:  # an interrupt may come after it has got its memory
                    if not version.resident and not memory.is_empty(emptied):
                        ledger.restored(version)
                    raise
            elif version is wanted or version.locks:
                ledger.hold_scratch(version, storage)
            else:
                continue
            self.rematerializations += 1
            self.rematerialized_bytes += version.nbytes
            version.last_access = ledger.clock
            if ledger.pressure:
                ledger.policy.rematerialized(version)
                if version.scratch is None:
                    ledger.evictable(version)


def _add_to(plan: Plan, wanted: Version) -> list[Operation]:
    """Plan what must run to make `wanted`. Returns the operations, the last in the program's order first.

    Versions that they make for one another get locked until the last of them has read them. So everything is
    recomputed once; otherwise what two operations read could be evicted between them, at every depth again.
    """
    planned: list[Operation] = []
    pending = [wanted]
    plan[id(wanted.operation)] = wanted, []
    while pending:
        version = pending.pop()
        operation = version.operation
        assert operation is not None
        locked = plan[id(operation)][1]
        if version is not wanted:
            planned.append(operation)
        for source in operation.inputs:
            if source.resident or source.operation is None:
                continue
            source.locks += 1
            locked.append(source)
            if id(source.operation) not in plan:
                plan[id(source.operation)] = source, []
                pending.append(source)

    def order(operation: Operation) -> tuple[int, int]:
        version, _ = plan[id(operation)]
        return version.age, version.mutations

    planned.sort(key=order, reverse=True)
    return planned
