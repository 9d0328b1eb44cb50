"""Rematerialization in as little memory as possible, in place of an error.

`core.rematerialize` recomputes nothing twice while memory suffices: what its plan needs later is locked as
soon as it is in memory. Where that does not fit, the targets are brought back here as a program with little
memory would compute them. Operations run in the program's order. When memory runs short, what is cheap for
its size and, according to the plans, needed last may be evicted, targets included. If it is missing when it
is needed, a plan for it is carried out first. So little more than what one operation takes must be in memory.

This only runs when the alternative is the budget error, so it is in Python.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dtrrun.core.graph import Operation, Version

if TYPE_CHECKING:
    from dtrrun.core.deallocation import Deallocation
    from dtrrun.core.eviction import Eviction
    from dtrrun.core.ledger import Ledger
    from dtrrun.core.rematerialize import Rematerializer

MOST_TURNS = 6  # plans for the inputs of one operation; each may evict what the previous one made
MOST_REPEATS, FEW = 8, 300  # most operations in all: so many for each one of the first plan, plus FEW

Reference = Callable[[], Version | None]
"""Weak, because references are counted to tell what is still read."""


class Step:
    """An operation in a plan, and the versions that it is to make. The last step of all has no operation."""

    __slots__ = ("inputs", "made", "operation", "order", "turns")

    def __init__(self, operation: Operation | None, inputs: Sequence[Version]) -> None:
        self.operation, self.inputs = operation, inputs
        self.made: list[Reference] = []
        self.order: tuple[int, int] | None = None
        self.turns = 0  # number of plans so far for inputs that were missing


class Plan:
    """Operations in the program's order. `uses`: the places of the steps that read a version, by its id."""

    __slots__ = ("place", "steps", "uses")

    def __init__(self, steps: list[Step]) -> None:
        self.steps, self.place = steps, 0
        self.uses: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            for source in step.inputs:
                self.uses.setdefault(id(source), []).append(place)

    def next_use(self, key: int) -> int | None:
        """Return the place of the next step that reads a version, including the present one."""
        places = self.uses.get(key, ())
        index = bisect_left(places, self.place)
        return places[index] if index < len(places) else None


def fit_one_by_one(ledger: Ledger, targets: Sequence[Version]) -> bool:
    """Return False if some operation that must run again can't, even with everything else evicted."""
    known = (*ledger.versions.values(), *ledger.scratch)
    evictable = sum(one.nbytes for one in known if one.resident and one.operation is not None)
    room = ledger.limit - ledger.reserved_bytes - ledger.resident_bytes + evictable
    seen = {id(one) for one in targets}
    pending = [one for one in targets if not one.resident]
    while pending:
        operation = pending.pop().operation
        if operation is None:
            continue
        signature = operation.signature
        need = signature.output_bytes - signature.workspace
        for source in {id(one): one for one in operation.inputs}.values():
            if source.operation is not None:
                need += source.nbytes
                if not source.resident and id(source) not in seen:
                    seen.add(id(source))
                    pending.append(source)
        if need > room:
            return False
    return True


def _is_missing(version: Version | None) -> bool:
    return version is not None and not version.resident


def _in_order(steps: dict[int, Step]) -> list[Step]:
    """Sort steps, given by the id of their operation, into the program's order.

    What is written in place has the age of its storage, so it comes after the youngest of its inputs.
    """
    stack = list(steps.values())
    while stack:
        step = stack[-1]
        before = [steps.get(id(source.operation)) for source in step.inputs if not source.resident]
        waiting = [one for one in before if one is not None and one.order is None]
        if step.order is None and waiting:
            stack.extend(waiting)
            continue
        del stack[-1]
        if step.order is not None:
            continue
        made = step.made[0]()
        latest = max([one.order for one in before if one is not None and one.order], default=(-1, -1))
        own = (-1, 0) if made is None else (made.age, 0)
        step.order = own if own > latest else (latest[0], latest[1] + 1)
    return sorted(steps.values(), key=lambda step: step.order or (0, 0))


def bring_back(
    ledger: Ledger,
    deallocation: Deallocation,
    eviction: Eviction,
    rematerializer: Rematerializer,
    targets: Sequence[Version],
    *,
    locked: bool,
) -> bool:
    """Make all targets resident, one operation at a time. Returns False if that was not possible.

    locked: whether the caller has locked them. These locks are lifted meanwhile: a resident target may have
    to be evicted and brought back.
    """
    lifted: list[Version] = []
    try:
        for version in targets if locked else ():
            version.locks -= 1
            lifted.append(version)
        if not fit_one_by_one(ledger, targets):
            return False
        return _Run(ledger, deallocation, eviction, rematerializer).to(targets)
    finally:
        while lifted:
            lifted[-1].locks += 1
            del lifted[-1]


class _Run:
    """One rematerialization. `_plans`: each is for inputs that the present step of the previous one lacks."""

    def __init__(
        self, ledger: Ledger, deallocation: Deallocation, eviction: Eviction, rematerializer: Rematerializer
    ) -> None:
        self._ledger, self._deallocation = ledger, deallocation
        self._eviction, self._rematerializer = eviction, rematerializer
        self._plans: list[Plan] = []
        self._locked: dict[int, Reference] = {}  # by id, once each
        self._costs: dict[int, int] = {}  # by id of what has been locked
        self._left = 0  # number of operations that may still run

    def to(self, targets: Sequence[Version]) -> bool:
        """Make all targets resident. Returns False if that was not possible. No locks remain."""
        try:
            self._plans.append(Plan([Step(None, targets)]))
            while self._plans:
                plan = self._plans[-1]
                if plan.place == len(plan.steps):
                    self._plans.pop()
                elif not self._go_on(plan, plan.steps[plan.place]):
                    return False
            return True
        except self._eviction.BudgetError:
            return False
        finally:
            try:
                self._unlock_all()
            except BaseException:  # an interrupt
                self._unlock_all()
                raise

    def _go_on(self, plan: Plan, step: Step) -> bool:
        """Run a step, or plan for what it lacks. Returns False if it can't be run."""
        operation = step.operation
        if operation is None:
            complete = self._lock_inputs(step)
            if complete:
                self._done(plan, step)
            return complete or self._plan_again(step)
        wanted = next(filter(_is_missing, [reference() for reference in step.made]), None)
        if wanted is not None:
            if wanted.operation is not operation:
                return False
            if not self._lock_inputs(step):
                return self._plan_again(step)
            self._left -= 1
            if self._left < 0:
                return False  # it could take exponentially long
            self._make_room(step, operation)
            if not self._rematerializer.run_with_room(wanted, operation):
                return False
            self._deallocation.came_back(operation)
            del wanted
        self._done(plan, step)
        return True

    def _lock_inputs(self, step: Step) -> bool:
        """Lock those of a step's inputs that are in memory. Returns whether all of them are."""
        complete = True
        for source in step.inputs:
            if source.resident:
                self._lock(source)
            else:
                complete = False
        return complete

    # -- plans -----------------------------------------------------------------------------------

    def _plan_again(self, step: Step) -> bool:
        """Plan for the inputs that a step lacks. Returns False if that has not helped before."""
        step.turns += 1
        return step.turns <= MOST_TURNS and self._plan_for(step.inputs)

    def _plan_for(self, targets: Sequence[Version]) -> bool:
        """Plan what must run to make the missing targets from what is in memory.

        Returns False if something is lost.
        """
        steps: dict[int, Step] = {}
        pending = [version for version in targets if not version.resident]
        seen = {id(version) for version in pending}
        while pending:
            version = pending.pop()
            operation = version.operation
            if operation is None:
                return False
            self._lock(version)  # so that it is kept once it has been made
            known = steps.get(id(operation))
            if known is None:
                steps[id(operation)] = known = Step(operation, operation.inputs)
                for source in operation.inputs:
                    if source.resident:
                        self._lock(source)
                    elif id(source) not in seen:
                        seen.add(id(source))
                        pending.append(source)
            known.made.append(version.weak())
        ordered = _in_order(steps)
        cost = 0
        for step in ordered:
            cost += step.operation.signature.cost if step.operation is not None else 0
            for reference in step.made:
                if (made := reference()) is not None:
                    self._costs[id(made)] = cost  # what precedes it may have to run again, too
        if len(self._plans) == 1:
            self._left = self._left or MOST_REPEATS * len(ordered) + FEW
        self._plans.append(Plan(ordered))
        return True

    def _next_use(self, key: int) -> int | None:
        """Return after how many steps a version is needed; None if no plan needs it."""
        before = 0
        for plan in reversed(self._plans):
            if (place := plan.next_use(key)) is not None:
                return before + place - plan.place
            before += len(plan.steps) - plan.place
        return None

    def _done(self, plan: Plan, step: Step) -> None:
        """Go to the next step, and unlock what is not needed any more."""
        plan.place += 1
        if step.operation is None:
            return
        for source in step.inputs:
            if id(source) in self._locked and self._next_use(id(source)) is None:
                self._unlock(id(source))
                self._rematerializer.read(source, step.operation)
        plan.steps[plan.place - 1] = Step(None, ())  # its operation no longer counts as a reader
        self._deallocation.cap_scratch()

    # -- memory ----------------------------------------------------------------------------------

    def _make_room(self, step: Step, operation: Operation) -> None:
        """Make room for an operation whose inputs are in memory, if that is possible."""
        need = self._rematerializer.needs(operation)
        while not self._eviction.try_room(need):
            if not self._give_up(self._eviction.excess(need), step):
                return  # the run reports what does not fit

    def _give_up(self, nbytes: int, present: Step) -> bool:
        """Unlock versions that take `nbytes`: those that are cheap for their size and needed last. Returns
        False if there is nothing to unlock.

        Inputs that a waiting step already holds go last if it has been planned for repeatedly: otherwise they
        could keep evicting one another.
        """
        waiting = [plan.steps[plan.place] for plan in self._plans]
        kept = {id(source) for step in waiting if step.turns > 1 for source in step.inputs}
        here = {id(source) for source in present.inputs}
        found: list[tuple[tuple[bool, float], int, int]] = []
        for key, reference in self._locked.items():
            version = reference()
            if version is not None and version.resident and key not in here and self._can_go(version):
                distance = self._next_use(key)
                score = 0.0 if distance is None else self._cost(version) / (version.nbytes * (distance + 1))
                found.append(((key in kept, score), version.nbytes, key))
        found.sort(key=lambda one: one[:2])  # ties: what was locked first, since keys are addresses
        chosen: list[tuple[int, int]] = []
        while found and nbytes > 0:
            chosen.append(found.pop(0)[1:])
            nbytes -= chosen[-1][0]
        for size, key in reversed(chosen):
            if size <= -nbytes:  # without it, the others suffice
                nbytes += size
            else:
                self._unlock(key, idle=True)
        return bool(chosen)

    def _cost(self, version: Version) -> int:
        """Return roughly what recomputing a version costs, as of when it was made or found."""
        cost = self._costs.get(id(version))
        if cost is None:
            cost, seen, stack = 0, {id(version)}, [version]
            while stack:
                operation = stack.pop().operation
                if operation is None:
                    continue
                cost += operation.signature.cost
                for source in operation.inputs:
                    if not source.resident and id(source) not in seen:
                        seen.add(id(source))
                        stack.append(source)
            self._costs[id(version)] = cost
        return cost

    def _can_go(self, version: Version) -> bool:
        return (
            version.locks == 1
            and version.operation is not None
            and version.nbytes >= self._ledger.least_bytes
        )

    def _lock(self, version: Version) -> None:
        if id(version) not in self._locked:
            self._locked[id(version)] = version.weak()
            version.locks += 1

    def _unlock(self, key: int, *, idle: bool = False) -> None:
        """Unlock a version. idle: the operation that it was locked for has not run."""
        version = self._locked[key]()
        if version is not None:
            version.locks -= 1
        del self._locked[key]
        if version is not None and idle:
            self._rematerializer.idle(version)

    def _unlock_all(self) -> None:
        while self._locked:
            self._unlock(next(iter(self._locked)), idle=True)
