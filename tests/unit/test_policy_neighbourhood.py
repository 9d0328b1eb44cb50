"""e*: the cached sets against a walk that follows the definition (App. C.2)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import Record

from dtrrun.core.neighbourhoods import EvictedNeighbourhood


def graph() -> list[Record]:
    """Eight storages with e*(t2) = {t1, t4} and e*(t3) = {t1, t4, t5}, as in the example of Sec. 2."""
    t: list[Record] = []
    for name, inputs in enumerate([[], [0], [1], [1], [2, 3], [3], [4, 5], [6]]):
        t.append(Record(name, 8, 10**name, inputs=[t[i] for i in inputs]))
    return t


def test_the_paper_s_example() -> None:
    exact = EvictedNeighbourhood({}, set())
    t = graph()
    for name in (1, 4, 5):
        exact.evicted(t[name])
    assert exact.projected_cost(t[2], 2) == 10**2 + 10**1 + 10**4
    assert exact.projected_cost(t[3], 3) == 10**3 + 10**1 + 10**4 + 10**5
    assert exact.projected_cost(t[0], 0) == 10**0 + 10**1  # t2 and t3, resident, cut it off
    exact.left(t[4])
    assert exact.projected_cost(t[2], 2) == 10**2 + 10**1
    exact.evicted(t[3])
    assert exact.projected_cost(t[0], 0) == 10**0 + 10**1 + 10**3 + 10**5


def test_ancestors_only() -> None:
    ancestors = EvictedNeighbourhood({}, set(), ancestors_only=True)
    t = graph()
    for name in (1, 3, 5, 7):
        ancestors.evicted(t[name])
    assert ancestors.projected_cost(t[6], 6) == 10**6 + 10**5 + 10**3 + 10**1
    assert ancestors.projected_cost(t[0], 0) == 10**0
    assert t[0].dependents is None  # not kept where nobody asks


def test_a_walk_is_made_again_only_where_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[tuple[str, int]] = []
    for name in ("_ancestors", "_descendants"):
        walk = getattr(EvictedNeighbourhood, name)

        def counted(self, node, number, name=name, walk=walk):  # type: ignore[no-untyped-def]
            walks.append((name, number))
            return walk(self, node, number)

        monkeypatch.setattr(EvictedNeighbourhood, name, counted)
    pool = dict(enumerate(graph()))
    exact = EvictedNeighbourhood(pool, set())
    for number, record in pool.items():
        record.bound = number
        exact.projected_cost(record, number)
    walks.clear()
    exact.evicted(pool[4])
    for number, record in pool.items():
        if number != 4:
            exact.projected_cost(record, number)
    assert sorted(walks) == [("_ancestors", 6), ("_descendants", 2), ("_descendants", 3)]


def test_a_record_that_dies_leaves_the_neighbourhood() -> None:
    due: set[int] = set()
    exact = EvictedNeighbourhood({}, due)
    parent = Record(0, 8, 1)
    child = Record(1, 8, 10, inputs=[parent])
    grandchild = Record(2, 8, 100, inputs=[child])
    for record in (child, grandchild):
        exact.evicted(record)
    assert exact.projected_cost(parent, 5) == 111
    del record, grandchild
    exact.settle()
    assert due == {5}
    assert exact.projected_cost(parent, 5) == 11


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), ancestors_only=st.booleans())
def test_costs_are_those_of_the_definition(seed: int, ancestors_only: bool) -> None:
    rng = random.Random(seed)
    due: set[int] = set()
    pool: dict[int, Record] = {}
    exact = EvictedNeighbourhood(pool, due, ancestors_only)
    records: list[Record] = []
    evicted: set[int] = set()
    dormant: set[int] = set()
    bounds: dict[int, float] = {}

    def closure(record: Record, up: bool) -> set[int]:
        """D_e (up) or D_e^T: the evicted that are reached from `record` through the evicted.

        Upwards also through the dormant.
        """
        absent = evicted | dormant if up else evicted
        found: set[int] = set()
        pending = [record]
        while pending:
            storage = pending.pop()
            near = (
                [other.name for other in storage.inputs]
                if up
                else [other.name for other in records if any(i is storage for i in other.inputs)]
            )
            pending += [records[name] for name in near if name in absent - found]
            found |= absent.intersection(near)
        return found

    def evict(record: Record) -> None:
        evicted.add(record.name)
        dormant.discard(record.name)
        for parent in record.inputs:
            if parent.name in dormant:
                evict(parent)

    def insert(record: Record) -> None:
        record.bound = len(pool)  # a new number each time, as the pool does
        pool[record.bound] = record

    for _ in range(120):
        draw = rng.random()
        if draw < 0.4 or not records:
            inputs = rng.sample(records, min(len(records), rng.randrange(4)))
            records.append(Record(len(records), 8, rng.randrange(20), inputs=inputs))
            insert(records[-1])
        elif draw < 0.45:  # mutation makes cycles
            record, source = rng.choice(records), rng.choice(records)
            if record is not source and not {record.name, source.name} & (evicted | dormant):
                record.inputs += (source,)
                exact.changed(record.bound)
                bounds.pop(record.bound, None)
        else:
            record = rng.choice(records)
            if record.name in evicted | dormant:
                evicted.discard(record.name)
                dormant.discard(record.name)
                exact.left(record)
                insert(record)
            else:
                record.bound = None
                if draw < 0.75:
                    evict(record)
                    exact.evicted(record)
                else:
                    if closure(record, up=False):
                        evict(record)
                    else:
                        dormant.add(record.name)
                    exact.released(record)
        for number in due:
            bounds.pop(number, None)
        due.clear()
        for record in rng.sample(records, len(records) // 2):
            if record.name not in evicted | dormant:
                names = closure(record, up=True)
                if not ancestors_only:
                    names |= closure(record, up=False)
                cost, lower = exact.watched_cost(record, record.bound)
                assert cost == lower == record.cost + sum(records[name].cost for name in names)
                assert bounds.get(record.bound, 0) <= cost
                bounds[record.bound] = lower
