"""A small world of storages and their records, driven by random events, for the policy's tests."""

from __future__ import annotations

import random
import weakref
from typing import Any

from dtrrun.core.pool import Policy


class Storage:
    """What a record stands for; the program holds it."""


class Record(weakref.ref):  # as the runtime's: a weakref that must not be hashed or compared
    __slots__ = (
        "__weakref__",
        "age",
        "bound",
        "component",
        "constant",
        "cost",
        "dependents",
        "inputs",
        "last_access",
        "name",
        "nbytes",
        "neighbourhood",
        "released",
        "resident",
        "uses",
    )

    def __new__(cls, name: int, *_: Any, **__: Any) -> Record:
        return super().__new__(cls, Storage())  # its referent is dead at once, so that hash() raises

    def __init__(
        self, name: int, nbytes: int, cost: int, now: int = 0, inputs: Any = (), constant: bool = False
    ) -> None:
        self.name, self.nbytes, self.cost, self.last_access = name, nbytes, cost, now
        self.inputs, self.constant, self.resident = tuple(inputs), constant, True
        self.released = not name % 5
        self.component = self.dependents = self.bound = self.neighbourhood = None


class World:
    """Applies events to records and to the policy that watches them.

    `held` is what the program still has names for; whatever it drops dies unless a record reads it.
    """

    def __init__(self, policy: Policy[Any], constants: int = 2) -> None:
        self.policy = policy
        self.now = 0
        self.held: dict[int, Record] = {n: Record(n, 8, 0, constant=True) for n in range(constants)}
        self.count = constants

    def get(self, index: int) -> Record:
        return self.held[sorted(self.held)[index % len(self.held)]]

    def tick(self, amount: int) -> None:
        self.now += amount

    def make(self, nbytes: int, cost: int, inputs: list[int]) -> None:
        record = Record(self.count, nbytes, cost, self.now, [self.get(i) for i in inputs])
        self.held[self.count] = record
        self.count += 1
        self.policy.insert(record)

    def access(self, index: int) -> None:
        self.get(index).last_access = self.now

    def evict(self, index: int) -> None:
        record = self.get(index)
        if record.resident and not record.constant:
            record.resident = False
            self.policy.evicted(record)

    def bring_back(self, index: int) -> None:
        record = self.get(index)
        if not record.resident:
            record.resident = True
            record.last_access = self.now
            self.policy.rematerialized(record)
            self.policy.insert(record)

    def pin(self, index: int) -> None:
        self.policy.discard(self.get(index))

    def unpin(self, index: int) -> None:
        record = self.get(index)
        if record.resident and not record.constant:
            self.policy.insert(record)

    def recost(self, index: int, cost: int) -> None:
        record = self.get(index)
        if record.resident and not record.constant:
            record.cost = cost
            self.policy.cost_changed(record)

    def rewire(self, index: int, other: int) -> None:
        """A resident storage is mutated with the help of another: its recipe gets an input more."""
        record, source = self.get(index), self.get(other)
        if record.resident and not record.constant and source.resident and source is not record:
            record.inputs += (source,)
            self.policy.cost_changed(record)

    def drop(self, index: int, announced: bool) -> None:
        """The program lets go: a resident storage's record ends; an evicted one's lives while it is read."""
        record = self.get(index)
        if record.constant:
            return
        del self.held[record.name]
        if record.resident:
            self.policy.discard(record)
        elif announced:
            self.policy.forget(record)

    def release(self, index: int) -> None:
        """The program lets go of a storage that recipes still read; the record is out of reach, but lives."""
        record = self.get(index)
        if record.constant:
            return
        del self.held[record.name]
        self.policy.forget(record)
        record.resident = False
        self.policy.released(record)

    def select(self, refused: int, evict: bool) -> int | None:
        """The chosen record's name; every seventh name from `refused` on is locked."""
        asked: list[int] = []

        def evictable(record: Record) -> bool:
            asked.append(record.name)
            return record.name % 7 != refused

        chosen = self.policy.select(self.now, evictable)
        assert len(asked) == len(set(asked)), "a record was asked about twice"
        if chosen is None:
            return None
        assert asked[-1] == chosen.name
        assert chosen.resident
        assert not chosen.constant
        name: int = chosen.name
        if evict:
            chosen.resident = False
            self.policy.evicted(chosen)
        return name


def random_event(rng: random.Random) -> tuple[str, Any]:
    """One event, as (method of World, arguments); the mix keeps some tens of records about."""
    any_record = rng.randrange(10**6)
    draw = rng.random()
    if draw < 0.30:
        inputs = [rng.randrange(10**6) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]
        nbytes = rng.choice([0, 1, 4, 4, 64, 100, 1000, 5000])
        return "make", (nbytes, rng.choice([0, 1, 5, 5, 30, 1000]), inputs)
    if draw < 0.50:
        return "select", (rng.randrange(9), rng.random() < 0.8)
    if draw < 0.60:
        return "bring_back", (any_record,)
    if draw < 0.72:
        return "tick", (rng.choice([1, 1, 10, 100, 5000]),)
    if draw < 0.80:
        return "access", (any_record,)
    if draw < 0.85:
        return "evict", (any_record,)
    if draw < 0.90:
        return "release", (any_record,)
    if draw < 0.95:
        return "drop", (any_record, rng.random() < 0.5)
    return rng.choice(
        [
            ("pin", (any_record,)),
            ("unpin", (any_record,)),
            ("recost", (any_record, rng.choice([0, 7, 500]))),
            ("rewire", (any_record, rng.randrange(10**6))),
        ]
    )


def play(world: World, rng: random.Random, length: int) -> None:
    for _ in range(length):
        event, arguments = random_event(rng)
        getattr(world, event)(*arguments)
