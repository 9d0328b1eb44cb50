from __future__ import annotations

import weakref

import pytest
from policy_world import Record

from dtrrun.core.heuristics import make_heuristic
from dtrrun.core.pool import Policy
from dtrrun.core.search import HeapSearch, ScanSearch, make_policy


def anything(record: Record) -> bool:
    return True


@pytest.fixture(params=[HeapSearch, ScanSearch])
def policy(request: pytest.FixtureRequest) -> Policy[Record]:
    made: Policy[Record] = request.param(make_heuristic("h_dtr_eq"))
    return made


def test_which_search() -> None:
    assert isinstance(make_policy("h_dtr_eq"), HeapSearch)
    assert isinstance(make_policy("h_dtr_eq", sample=True), ScanSearch)
    assert isinstance(make_policy("random"), ScanSearch)
    with pytest.raises(ValueError, match="unknown heuristic"):
        make_policy("best")


def test_an_empty_pool(policy: Policy[Record]) -> None:
    assert policy.select(0, anything) is None
    assert len(policy) == 0


def test_the_stalest_largest_and_cheapest_goes(policy: Policy[Record]) -> None:
    stale, large, cheap, plain = (
        Record(0, 100, 10, now=40),
        Record(1, 300, 10, now=80),
        Record(2, 100, 4, now=80),
        Record(3, 100, 10, now=80),
    )
    order = []
    for record in (plain, cheap, large, stale):
        policy.insert(record)
    while (chosen := policy.select(100, anything)) is not None:
        order.append(chosen.name)
        policy.discard(chosen)
    assert order == [1, 0, 2, 3]


def test_of_equal_scores_the_first_inserted_goes(policy: Policy[Record]) -> None:
    records = [Record(name, 8, 1) for name in range(9)]
    for record in reversed(records):
        policy.insert(record)
    for record in reversed(records):
        assert policy.select(5, anything) is record
        policy.discard(record)


def test_a_refused_node_is_passed_over_but_stays(policy: Policy[Record]) -> None:
    first, second = Record(0, 8, 1), Record(1, 8, 2)
    policy.insert(first)
    policy.insert(second)
    assert policy.select(5, lambda record: record is not first) is second
    assert policy.select(5, lambda record: False) is None
    assert policy.select(5, anything) is first
    assert len(policy) == 2


def test_nodes_that_are_discarded_while_being_asked_about(policy: Policy[Record]) -> None:
    """The runtime finds out that a recipe can't be secured, and pins what depends on it."""
    records = [Record(name, 8, 1 + name) for name in range(4)]
    for record in records:
        policy.insert(record)

    def evictable(record: Record) -> bool:
        assert record.bound is not None
        if record is records[0]:
            policy.discard(records[0])
            policy.discard(records[1])
            return False
        return True

    assert policy.select(5, evictable) is records[2]
    policy.discard(records[2])
    assert policy.select(5, evictable) is records[3]


def test_events_that_change_nothing(policy: Policy[Record]) -> None:
    empty, record = Record(0, 0, 1), Record(1, 8, 1)
    policy.insert(empty)  # to evict it would free nothing
    policy.insert(record)
    policy.insert(record)
    assert len(policy) == 1
    policy.discard(record)
    policy.discard(record)
    policy.cost_changed(record)
    policy.rematerialized(record)
    policy.forget(record)
    assert len(policy) == 0
    assert policy.select(1, anything) is None


def test_an_eviction_that_is_reported_twice_counts_once(policy: Policy[Record]) -> None:
    """Evicted, then released by the program while something still depends on it."""
    parent = Record(0, 8, 10)
    child = Record(1, 8, 5, inputs=[parent])
    grandchild = Record(2, 8, 3, inputs=[child])
    policy.insert(parent)
    for record in (child, grandchild, child):
        policy.evicted(record)
    assert policy.projected_cost(parent) == 18
    policy.rematerialized(child)
    assert policy.projected_cost(parent) == 10


def test_an_access_and_a_new_cost_are_seen(policy: Policy[Record]) -> None:
    a, b = Record(0, 8, 10), Record(1, 8, 11)
    policy.insert(a)
    policy.insert(b)
    assert policy.select(100, anything) is a
    a.last_access = 90
    assert policy.select(100, anything) is b
    b.cost = 10_000
    policy.cost_changed(b)
    assert policy.select(101, anything) is a


def test_a_node_that_is_not_resident_is_never_chosen(policy: Policy[Record]) -> None:
    record = Record(0, 8, 1)
    policy.insert(record)
    record.resident = False
    assert policy.select(5, anything) is None


@pytest.mark.parametrize("search", [HeapSearch, ScanSearch])
def test_small_nodes_are_chosen_last(search: type[Policy[Record]]) -> None:
    policy = search(make_heuristic("h_dtr_local"), 0.01)
    small, large = Record(0, 5, 0), Record(1, 2000, 1000)
    policy.insert(small)
    policy.insert(large)
    assert policy.select(5, anything) is large
    assert policy.select(5, lambda record: record is small) is small
    policy.evicted(large)
    assert policy.select(5, anything) is small  # not small any more, in a pool of its own


def test_records_die_as_soon_as_nobody_else_holds_them(policy: Policy[Record]) -> None:
    parent = Record(0, 8, 10)
    child = Record(1, 8, 5, inputs=[parent])
    for record in (parent, child):
        policy.insert(record)
    policy.select(5, anything)
    policy.evicted(child)
    policy.select(6, anything)
    seen = weakref.ref(child)
    del child, record
    assert seen() is None
    policy.discard(parent)
    seen = weakref.ref(parent)
    del parent
    assert seen() is None
