from __future__ import annotations

import random
from collections import Counter

from policy_world import Record, World, play

from dtrrun.core.heuristics import make_heuristic
from dtrrun.core.pool import Policy
from dtrrun.core.search import ScanSearch, make_policy


def filled(policy: Policy[Record], sizes: list[int]) -> list[Record]:
    records = [Record(name, nbytes, 10, now=name) for name, nbytes in enumerate(sizes)]
    for record in records:
        policy.insert(record)
    return records


def anything(record: Record) -> bool:
    return True


def test_a_sample_is_the_root_of_the_pool() -> None:
    policy = make_policy("size", sample=True)
    filled(policy, list(range(1, 101)))
    assert policy.select(1000, anything) is not None
    assert policy.score_evaluations == 10


def test_samples_differ_and_are_reproducible() -> None:
    def choices(seed: int) -> list[int]:
        policy = make_policy("lru", sample=True, seed=seed)
        filled(policy, [8] * 100)
        return [policy.select(1000, anything).name for _ in range(20)]

    assert choices(1) == choices(1) != choices(2)
    assert len(set(choices(1))) > 5
    assert sum(choices(1)) / 20 < 20  # the least of ten of a hundred


def test_a_sample_without_an_evictable_node_is_no_reason_to_fail() -> None:
    policy = make_policy("lru", sample=True)
    records = filled(policy, [8] * 100)
    for _ in range(20):
        assert policy.select(1000, lambda record: record is records[63]) is records[63]


def test_random_chooses_evenly() -> None:
    policy = make_policy("random", seed=4)
    filled(policy, [8] * 10)
    chosen = Counter(policy.select(0, anything).name for _ in range(2000))
    assert set(chosen) == set(range(10))
    assert min(chosen.values()) > 120


def test_a_score_of_the_user_is_given_what_it_asks_for() -> None:
    seen: list[tuple[float, ...]] = []

    def score(size: int, staleness: int, cost: float, projected_cost: float) -> float:
        seen.append((size, staleness, cost, projected_cost))
        return -cost

    heuristic = make_heuristic("h_dtr_eq").__class__("mine", score, "eqclass", ages=True, ordered=False)
    policy: Policy[Record] = ScanSearch(heuristic)
    a = Record(0, 8, 3, now=5)
    b = Record(1, 16, 4, now=6, inputs=[a])
    c = Record(2, 32, 1, now=7, inputs=[b])
    for record in (a, b, c):
        policy.insert(record)
    b.resident = False
    policy.evicted(b)
    assert policy.select(10, anything) is a
    assert seen == [(8, 5, 3, 7), (32, 3, 1, 5)]


def test_it_survives_any_course_of_events_when_sampling() -> None:
    play(World(make_policy("h_dtr_eq", sample=True, ignore_small=0.01)), random.Random(0), 3000)
