"""One operator after the other, as the live runtime handles them (`runtime.careful.Careful`).

Fact by fact what `calls`, `mutation` and `outcomes` do there, without tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dtrrun.ledger.ledger import Ledger
from dtrrun.ledger.record import Blank, Op, Record, new_record
from dtrrun.ledger.replay import Replay

from .snapshot import new_op
from .standins import Content

SHARED = "shared with a tensor without plain storage"


class Pending:
    """An operator under way. `holes` of `records`: which tensor among its arguments."""

    __slots__ = ("changing", "facts", "locked", "name", "recordable", "records", "written")

    def __init__(self, name: str, facts: dict[str, Any], records: list[Record]) -> None:
        self.name = name
        self.facts = facts
        self.records = records
        self.written: list[list[int]] = facts.get("written", [])
        self.locked: list[Record] = []
        self.changing: list[Record] = []
        self.recordable = not facts.get("once") and not any(record.exposed for record in records)


class Operators:
    """Runs the operators of a log."""

    def __init__(self, ledger: Ledger, replay: Replay, contents: dict[int, Content]) -> None:
        self.ledger = ledger
        self.replay = replay
        self.contents = contents
        self.observe: Callable[[str, int, list[Record]], None] | None = None
        """Told of each operator, but for views: its name, cost in ns and inputs."""

    def record(self, number: int) -> Record:
        return self.ledger.records[id(self.contents[number])]

    def run(self, name: str, cost: int, facts: dict[str, Any]) -> None:
        """Raises OutOfBudget, Stopped."""
        ledger = self.ledger
        ledger.drain()
        if facts.get("short"):
            record = self.record(facts["in"][0])
            if record.resident or facts.get("untouching"):
                record.last_access = ledger.clock
                ledger.age += 1
                return
        call = self._prepared(name, facts)
        self._admit(call)
        self._finish(call, cost)

    def failed(self, facts: dict[str, Any]) -> None:
        """An operator that raised."""
        self.ledger.drain()
        call = self._prepared("failed", facts)
        self._admit(call)
        self._unlock(call)
        for holes in call.written:
            self.ledger.half_written(call.records[holes[0]])
        if facts.get("updates"):
            for hole in facts["statistics"]:
                self.ledger.half_written(call.records[hole])

    def _prepared(self, name: str, facts: dict[str, Any]) -> Pending:
        call = Pending(name, facts, [self.record(number) for number in facts["in"]])
        for hole in facts.get("leaves", ()):
            if call.records[hole].pin is None:
                call.records[hole].pin = "parameter"
        return call

    def _admit(self, call: Pending) -> None:
        ledger, facts = self.ledger, call.facts
        if facts.get("untouching"):
            for record in call.records:
                record.locks += 1
        else:
            self.replay.lock(call.records)
        call.locked = list(call.records)
        if facts.get("opaque"):
            for record in call.records:
                ledger.expose(record, SHARED)
        if call.written:
            self._prepare_mutation(call)
        if facts.get("updates"):
            statistics = [call.records[hole] for hole in facts["statistics"]]
            for record in statistics:
                ledger.make_constant(record, "running statistics")
            ledger.about_to_change(statistics, call.changing)
        ledger.make_room(facts["bytes"], call.name)

    def _prepare_mutation(self, call: Pending) -> None:
        written = call.written
        leaves, whole = call.facts.get("leaves", ()), dict(call.facts.get("overwritten", ()))
        targets = [call.records[holes[0]] for holes in written]
        call.recordable = self.ledger.prepare_writes(
            targets,
            call.recordable and not call.facts.get("reshapes"),
            lambda place: written[place][0] in leaves,
            lambda place: place in whole,
            call.changing,
        )

    def _finish(self, call: Pending, cost: int) -> None:
        ledger, facts = self.ledger, call.facts
        ledger.age += 1
        if not facts.get("view"):
            ledger.clock += cost
        ledger.drain()
        self._unlock(call)
        targets = [(holes[0], call.records[holes[0]]) for holes in call.written]
        statistics = facts.get("statistics", ())
        for hole in statistics:
            if facts.get("updates") and call.records[hole].used:
                ledger.supersede(call.records[hole], None, 0)
        op = self._recipe(call, cost) if call.recordable else None
        outputs: list[tuple[int, Any]] = []
        resized = facts.get("resized", {})
        for hole, record in targets:
            if op is not None:
                record = ledger.supersede(record, op, cost)
                outputs.append((~hole, weakref.ref(record)))
            elif record.used:
                record = ledger.supersede(record, None, 0)
            if str(hole) in resized:
                ledger.resized(record, resized[str(hole)])
        if facts.get("sparse") and not facts.get("view"):
            for place, record in enumerate(call.records):
                if place not in statistics:
                    ledger.expose(record, SHARED)
        if not facts.get("view"):
            self._enter_outputs(call, op, outputs, cost)
        if op is not None:
            simple = len(outputs) == 1 and outputs[0][0] == 0 and not call.written
            op.outputs = None if simple else tuple(outputs)
        if self.observe is not None and not facts.get("view"):
            self.observe(call.name, cost, call.records)
        if ledger.resident_bytes > ledger.limit and facts.get("shrinks"):
            ledger.shrink([self.record(number) for _, number, _, _ in facts.get("out", ())], call.name)

    def _unlock(self, call: Pending) -> None:
        while call.changing:
            call.changing.pop().exposed = False
        while call.locked:
            call.locked.pop().locks -= 1

    def _recipe(self, call: Pending, cost: int) -> Op:
        facts = call.facts
        tensors: list[Any] = []
        blank = {call.written[place][0]: nbytes for place, nbytes in facts.get("overwritten", ())}
        statistics = facts.get("statistics", ())
        for hole, record in enumerate(call.records):
            if hole in statistics:
                continue
            if hole in blank:
                tensors.append(Blank(blank[hole], None))
            else:
                record.used = True
                tensors.append(record)
        return new_op(call.name, cost, facts.get("again", facts["bytes"]), tensors)

    def _enter_outputs(self, call: Pending, op: Op | None, outputs: list[tuple[int, Any]], cost: int) -> None:
        ledger, facts = self.ledger, call.facts
        for number in facts.get("taken", ()):
            ledger.expose(self.record(number), "handed out")
        for where, number, nbytes, kind in facts.get("out", ()):
            content = Content(nbytes, "elsewhere" if kind == "elsewhere" else "ours")
            self.contents[number] = content
            if op is None or kind == "odd":
                pin = "uninitialised" if facts.get("uninitialised") else "not replayable"
                record = ledger.adopt(content, pin=pin)
                record.exposed = record.exposed or kind == "odd"
            elif kind == "elsewhere":
                ledger.adopt(content)
            else:
                record = new_record(content, ledger.on_death, nbytes, ledger.age, ledger.clock)
                record.op, record.cost = op, cost
                ledger.records[record.key] = record
                ledger.grow(record.nbytes)
                outputs.append((where, weakref.ref(record)))
                if ledger.pressure and record.nbytes >= ledger.least_bytes:
                    ledger.policy.insert(record)
