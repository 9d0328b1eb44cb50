"""ẽ*: the union-find structure against components kept as plain sets (App. C.2)."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import Record

from dtrrun.core import neighbourhoods
from dtrrun.core.neighbourhoods import EvictedComponents


def chain(length: int, cost: int = 10) -> list[Record]:
    records: list[Record] = []
    for name in range(length):
        records.append(Record(name, 8, cost, inputs=records[-1:]))
    return records


def test_neighbouring_components_are_summed_not_merged() -> None:
    components = EvictedComponents({}, set())
    a, b, c, d, e = records = chain(5)
    for record in (a, b, d):
        components.evicted(record)
    assert [components.projected_cost(record, 0) for record in (c, e)] == [10 + 20 + 10, 10 + 10]
    components.evicted(c)
    assert components.projected_cost(e, 0) == 50
    assert [record.component.parent is None for record in records[:4]].count(True) == 1


def test_rematerialization_takes_its_own_cost_out_and_leaves_phantom_connections() -> None:
    components = EvictedComponents({}, set())
    a, b, c, d, e = chain(5)
    for record in (b, c, d):
        components.evicted(record)
    components.left(c)
    assert c.component is None
    # b and d stay one component, so c counts it once, and a counts d too
    assert [components.projected_cost(record, 0) for record in (a, c, e)] == [30, 30, 30]
    components.evicted(c)
    assert components.projected_cost(a, 0) == 40


def test_constants_are_in_no_neighbourhood() -> None:
    components = EvictedComponents({}, set())
    weight = Record(0, 8, 0, constant=True)
    x = Record(1, 8, 10, inputs=[weight])
    y = Record(2, 8, 10, inputs=[weight, x])
    components.evicted(x)
    assert weight.dependents is None
    assert components.projected_cost(y, 0) == 20


def test_a_record_that_dies_leaves_its_component() -> None:
    components = EvictedComponents({}, set())
    parent, child = chain(2)
    grandchild = Record(2, 8, 5, inputs=[child])
    for record in (child, grandchild):
        components.evicted(record)
    assert components.projected_cost(parent, 0) == 25
    del grandchild, record
    components.settle()
    assert components.projected_cost(parent, 0) == 20
    del child  # nothing but the parent knows of it: weakly
    components.settle()
    assert components.projected_cost(parent, 0) == 10


def test_what_was_reached_through_the_dead_only_is_not_counted() -> None:
    components = EvictedComponents({}, set())
    resident, evicted = Record(0, 8, 1), Record(1, 8, 10)
    both = Record(2, 8, 100, inputs=[resident, evicted])
    components.evicted(evicted)
    components.evicted(both)
    assert components.projected_cost(resident, 0) == 111
    del both
    components.settle()
    assert components.projected_cost(resident, 0) == 1


def test_who_is_gone_does_not_pile_up_at_a_parent_that_lives() -> None:
    components = EvictedComponents({}, set())
    parent = Record(0, 8, 10)
    children = [Record(name, 8, 1, inputs=[parent]) for name in range(1000)]
    for child in children:
        components.evicted(child)
        components.left(child)
    assert components.projected_cost(parent, 0) == 10
    assert len(parent.dependents) <= 64


def test_watchers_are_due_when_the_cost_falls_below_their_bound() -> None:
    due: set[int] = set()
    pool: dict[int, Record] = {}
    components = EvictedComponents(pool, due)
    records = chain(200)
    for record in records[1:]:
        components.evicted(record)
    pool[7] = records[0]
    cost, lower = components.watched_cost(records[0], 7)
    assert cost == 2000
    assert 1900 < lower <= 2000
    components.left(records[150])  # far away, and little
    assert not due
    for record in records[100:150]:
        components.left(record)
        assert due or components.projected_cost(records[0], 7) >= lower
    assert due == {7}
    due.clear()
    components.watched_cost(records[0], 7)
    components.left(records[1])  # beside it: its component may be lost altogether
    assert due == {7}


def test_bounds_hold_when_components_merge() -> None:
    """S reads a and b, of components {a, a2, …} and {b}; a bridge joins the two, then most of a's goes."""
    due: set[int] = set()
    components = EvictedComponents({}, due)
    first = chain(50)
    b = Record(50, 8, 400)
    s = Record(51, 8, 1, inputs=[first[-1], b])
    beside_a = [Record(name, 8, 1, inputs=[first[-1]]) for name in (60, 61, 62)]
    beside_b = Record(52, 8, 1, inputs=[b])
    bridge = Record(53, 8, 0, inputs=[first[0], b])
    for record in (*first, b):
        components.evicted(record)
    assert components.watched_cost(s, 7)[0] == 1 + 500 + 400
    assert components.watched_cost(beside_b, 8)[0] == 1 + 400
    for number, record in enumerate(beside_a, 9):
        components.watched_cost(record, number)
    components.evicted(bridge)
    assert not due
    for record in first[1:20]:
        components.left(record)
    assert components.projected_cost(s, 7) == 1 + 310 + 400
    assert due == {7, 8, 9, 10, 11}


def test_a_released_storage_counts_for_what_depends_on_it_alone() -> None:
    components = EvictedComponents({}, set())
    a, b, c, d = chain(4)
    components.released(b)
    assert [components.projected_cost(record, 0) for record in (a, c, d)] == [10, 20, 10]
    components.evicted(c)  # now b will have to be rematerialized, and be given a
    assert [components.projected_cost(record, 0) for record in (a, d)] == [30, 30]
    components.left(c)
    assert components.projected_cost(a, 0) == 20  # phantom


def test_a_released_storage_joins_when_something_evicted_depends_on_it() -> None:
    components = EvictedComponents({}, set())
    a, b, c, d = chain(4)
    components.evicted(c)
    components.released(b)
    assert [components.projected_cost(record, 0) for record in (a, d)] == [30, 30]


def test_long_chains_of_released_storages_are_joined() -> None:
    components = EvictedComponents({}, set())
    records = chain(3 * neighbourhoods.DORMANT)
    for record in records[1:-1]:
        components.released(record)
    assert components.projected_cost(records[-1], 0) == 10 * (len(records) - 1)
    counted = components._evicted_neighbours(records[-1])
    assert len(counted) <= neighbourhoods.DORMANT + 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_costs_are_those_of_plain_sets(seed: int) -> None:
    """Each evicted storage's component as a set of names; rematerialized members only give up their cost."""
    rng = random.Random(seed)
    due: set[int] = set()
    pool: dict[int, Record] = {}
    components = EvictedComponents(pool, due)
    records: list[Record] = []
    model: dict[int, set[int]] = {}  # of each evicted storage, its component: shared by the members
    dormant: set[int] = set()
    bounds: dict[int, float] = {}

    def dependents(record: Record) -> list[int]:
        return [other.name for other in records if any(parent is record for parent in other.inputs)]

    def behind(record: Record) -> set[int]:
        """What it is computed from and is out of memory, through the dormant."""
        found: set[int] = set()
        pending = [parent.name for parent in record.inputs]
        while pending:
            name = pending.pop()
            if name not in found and (name in model or name in dormant):
                found.add(name)
                if name in dormant:
                    pending += [parent.name for parent in records[name].inputs]
        return found

    def members_beside(record: Record) -> set[int]:
        near = behind(record) | {name for name in dependents(record) if name in model}
        return near.union(*(model[name] for name in near if name in model))

    def evict(record: Record) -> None:
        dormant.discard(record.name)
        near = {parent.name for parent in record.inputs} | set(dependents(record))
        component = {record.name}.union(*(model[name] for name in near if name in model))
        model.update(dict.fromkeys(component, component))
        for parent in record.inputs:
            if parent.name in dormant:
                evict(parent)

    for _ in range(150):
        draw = rng.random()
        if draw < 0.4 or not records:
            inputs = rng.sample(records, min(len(records), rng.randrange(4)))
            records.append(Record(len(records), 8, rng.randrange(20), inputs=inputs))
            pool[len(records) - 1] = records[-1]
            continue
        record = rng.choice(records)
        if record.name in model:
            components.left(record)
            model.pop(record.name).remove(record.name)
        elif record.name in dormant:
            components.left(record)
            dormant.remove(record.name)
        else:
            bounds.pop(record.name, None)
            if draw < 0.85:
                components.evicted(record)
                evict(record)
            else:
                components.released(record)
                if any(name in model for name in dependents(record)):
                    evict(record)
                else:
                    if not record.component.dormant:
                        return  # too many above it
                    dormant.add(record.name)
        for number in due:
            bounds.pop(number, None)
        due.clear()
        for record in records:
            if record.name not in model and record.name not in dormant:
                cost = components.projected_cost(record, record.name)
                most = record.cost + sum(records[name].cost for name in members_beside(record))
                assert cost == most
                assert bounds.get(record.name, 0) <= cost
        record = rng.choice(records)
        if record.name not in model and record.name not in dormant:
            bounds[record.name] = components.watched_cost(record, record.name)[1]
