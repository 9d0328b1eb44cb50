"""How far back recipes reach: no further than the program's outer loop has gone round.

What a program carries from one turn of its loop to the next (running averages, hidden states, weights that
are replaced by new tensors, a cache that grows) would otherwise be recomputed from the very first turn on.
The records of every turn, with all the constants that they read, would be kept for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dtrrun.ledger.foreign import LostError
from dtrrun.ledger.recipes import Recipes
from dtrrun.ledger.record import Record

SMALL = 4096  # bytes


class History(Recipes):
    """Gives up recipes that have grown too long, or whose inputs have changed."""

    step_age = 0  # of the last step's end
    cut_age = 0  # of the last `cut_history`

    def end_period(self) -> None:
        """A turn of the program's outer loop is over."""
        self.drain()
        self.forget_history()
        self.cut_history()
        self.sweep()
        self.step_age = self.age + 1

    def compact(self, age: int) -> None:
        """A while is over in which no such turn has ended. age: what is small and older loses its history."""
        self.forget_small(age)
        self.cut_history()

    def cut_history(self) -> None:
        """Since the last call: what would be recomputed from older storages that are gone becomes a constant.

        What of it is evicted comes back, if there is room.
        """
        known: dict[int, bool] = {}
        carried: list[Record] = []
        for record in reversed(list(self.records.values())):
            if record.age < self.cut_age and record.version == 0:
                break  # entered before
            if record.op is not None and not record.locks and self._reaches_back(record, known):
                carried.append(record)
        for record in reversed(carried):  # only now: until here `known` goes by ids of what they keep alive
            content = record()  # another thread may let go of it at any moment
            if content is not None and (record.resident or self._restored(record)):
                self.make_constant(record, "carried over")
        self.cut_age = self.age + 1

    def _reaches_back(self, record: Record, known: dict[int, bool]) -> bool:
        """Whether a recipe needs storages from before `cut_age` that the program has let go of.

        What it still has is where a search ends: that is judged by itself.
        """

        def rule(node: Record) -> bool | list[Record]:
            if node.op is None:
                return False
            if node is not record and node.age < self.cut_age:
                return True
            return [source for source in node.op.inputs if not source.alive]

        return _found(record, known, rule, any)

    def forget_history(self) -> None:
        """At a step's end: what was computed from weights that have changed since has lost its recipe.

        Without this a program that keeps every `loss` would keep the records of every step.
        """
        intact: dict[int, bool] = {}
        for record in reversed(list(self.records.values())):
            if record.age < self.step_age and record.version == 0:
                break  # entered before this step
            content = record()
            there = content is not None and record.op is not None and record.resident
            if there and not self._is_intact(record, intact):
                self.make_constant(record, "input mutated")

    def forget_small(self, age: int) -> None:
        """Small storages that live on and on (predictions, losses) need no history: it would pile up.

        age: those that are younger keep theirs.
        """
        for record in list(self.records.values()):
            if record.age >= age:
                break
            small = record.nbytes <= SMALL and record.op is not None and not record.op.secured
            content = record()
            if small and content is not None and record.resident and not record.locks:
                self.make_constant(record, "small and old")

    def _is_intact(self, record: Record, intact: dict[int, bool]) -> bool:
        """Whether `record` could be recomputed now; like `secure`, but holds nothing."""

        def rule(node: Record) -> bool | list[Record]:
            if node.op is None:
                exposed = node.exposed and not self.foreign.trusts(node)
                return node.resident and not exposed and node.memory() is not None
            return node.op.secured or list(node.op.inputs)

        return _found(record, intact, rule, all)

    def _restored(self, record: Record) -> bool:
        try:
            self.rematerialize((record,))
        except (self.out_of_memory, AssertionError, LostError):
            return False
        return True


def _found(
    record: Record,
    known: dict[int, bool],
    rule: Callable[[Record], bool | list[Record]],
    joined: Callable[[Iterable[bool]], bool],
) -> bool:
    """What holds for a record: what `rule` says, or `joined` of what holds for the records that it names.

    With a stack of its own. `known`: what was found so far, by id.
    """
    stack = [record]
    while stack:
        node = stack[-1]
        if id(node) not in known:
            answer = rule(node)
            if isinstance(answer, list):
                unknown = [source for source in answer if id(source) not in known]
                if unknown:
                    stack.extend(unknown)
                    continue
                answer = joined([known[id(source)] for source in answer])
            known[id(node)] = answer
        stack.pop()
    return known[id(record)]
