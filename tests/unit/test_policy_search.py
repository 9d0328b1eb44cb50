"""Search by heap = search by scan, for every heuristic and any course of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import Record, World, play, random_event

from dtrrun.core.heuristics import ABLATION_NAMES, HEURISTIC_NAMES, make_heuristic
from dtrrun.core.search import HeapSearch, ScanSearch

PAPER = [name for name in HEURISTIC_NAMES if make_heuristic(name).ordered]


def check_same_choices(name: str, seed: int, length: int, ignore_small: float) -> None:
    rng = random.Random(seed)
    by_heap = World(HeapSearch(make_heuristic(name), ignore_small))
    by_scan = World(ScanSearch(make_heuristic(name), ignore_small))
    for step in range(length):
        event, arguments = random_event(rng)
        answers = [getattr(world, event)(*arguments) for world in (by_heap, by_scan)]
        assert answers[0] == answers[1], (step, event)


@pytest.mark.parametrize("name", PAPER)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), ignore_small=st.sampled_from([0.0, 0.0, 0.01, 0.5]))
def test_heap_chooses_what_the_scan_chooses(name: str, seed: int, ignore_small: float) -> None:
    check_same_choices(name, seed, 500, ignore_small)


@pytest.mark.parametrize("name", ABLATION_NAMES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_heap_chooses_what_the_scan_chooses_ablated(name: str, seed: int) -> None:
    check_same_choices(name, seed, 500, ignore_small=0.0)


def test_scores_may_be_far_apart() -> None:
    """With a root of staleness, one bound holds for longer than a float can tell."""
    heuristic = make_heuristic("h_chain(c=ancestors,s=.1,next=0,released=alike)")
    policy = HeapSearch(heuristic)
    records = [Record(1, 1, 10**30), Record(2, 10**18, 1)]
    for record in records:
        policy.insert(record)
    assert policy.select(1000, lambda _: True) is records[1]


def test_choices_are_the_same_with_a_clock_in_nanoseconds_of_days() -> None:
    rng = random.Random(3)
    worlds = [World(search(make_heuristic("h_dtr_eq"))) for search in (HeapSearch, ScanSearch)]
    for world in worlds:
        world.now = 10**15
    for _ in range(3000):
        event, arguments = random_event(rng)
        if event == "tick":
            arguments = (arguments[0] * 10**9 + 1,)
        answers = [getattr(world, event)(*arguments) for world in worlds]
        assert answers[0] == answers[1]


def test_few_scores_are_computed() -> None:
    """A chain of 3,000 storages in steady state; the scan computes 1,000 scores a time."""
    policy: HeapSearch[Record] = HeapSearch(make_heuristic("h_dtr_eq"))
    rng = random.Random(0)
    records: list[Record] = []
    selects = 0
    for now in range(0, 300_000, 100):
        record = Record(now, rng.randrange(1, 10**6), 100, now, records[-1:])
        records.append(record)
        policy.insert(record)
        if len(policy) > 1000:
            chosen = policy.select(now, lambda record: record is not records[-1])
            assert chosen is not None
            chosen.resident = False
            policy.evicted(chosen)
            selects += 1
    assert selects == 2000
    assert policy.score_evaluations < 20 * selects
    assert policy.scoring_ns > 0
    assert policy.search_ns > 0


@pytest.mark.parametrize("name", ["h_dtr_eq", "h_dtr"])
def test_nothing_piles_up(name: str) -> None:
    policy: HeapSearch[Record] = HeapSearch(make_heuristic(name), ignore_small=0.01)
    world = World(policy)
    play(world, random.Random(1), 20_000)
    assert len(policy) > 1000
    while len(policy) > 10:
        world.select(refused=9, evict=True)
    for container in (policy._bounds, policy._wakings, policy._asleep, policy._waking, policy._small):
        assert len(container) <= 64 + 2 * len(policy)
    assert len(policy._due) <= 1
    for cache in (getattr(policy._neighbourhood, "_above", {}), getattr(policy._neighbourhood, "_below", {})):
        assert len(cache) <= 64 + 3 * len(policy)


def test_an_interrupted_search_loses_nothing() -> None:
    policies = [search(make_heuristic("h_dtr_eq")) for search in (HeapSearch, ScanSearch)]
    worlds = [World(policy) for policy in policies]
    for world in worlds:
        play(world, random.Random(5), 400)

    def interrupt(record: Record) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policies[0].select(worlds[0].now, interrupt)
    while (expected := worlds[1].select(refused=9, evict=True)) is not None:
        assert worlds[0].select(refused=9, evict=True) == expected
    assert worlds[0].select(refused=9, evict=True) is None
