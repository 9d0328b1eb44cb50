"""dtrrun.simulator.counting"""

import pytest

from dtrrun.core.heuristics import make_heuristic
from dtrrun.core.neighbourhoods import Component
from dtrrun.simulator.counting import accesses, counting_policy, depth
from dtrrun.simulator.schedule import schedule_of
from dtrrun.simulator.simulate import simulate
from tests.unit.policy_world import Record
from tests.unit.simulator_logs import random_log

NAMES = ["lru", "size", "h_dtr_local", "h_dtr", "h_dtr_eq", "msps", "h_chain", "random"]


@pytest.mark.parametrize("heuristic", NAMES)
@pytest.mark.parametrize("scan", [False, True])
def test_who_counts_chooses_the_same(heuristic, scan):
    for seed in range(3):
        schedule = schedule_of(random_log(seed, 100), "random")
        budget = schedule.peak_bytes // 2
        plain, counted = (
            simulate(schedule, budget, heuristic, limit=20, scan=scan, count=count) for count in (False, True)
        )
        assert plain.accesses is None
        assert counted.accesses >= counted.evaluations == plain.evaluations > 0
        for field in ("status", "time", "evictions", "rematerializations"):
            assert getattr(plain, field) == getattr(counted, field)


@pytest.mark.parametrize("heuristic", ["lru", "size", "h_dtr_local", "random"])
def test_a_scan_without_a_neighbourhood_has_as_many_as_scores(heuristic):
    schedule = schedule_of(random_log(1, 100), "random")
    outcome = simulate(schedule, schedule.peak_bytes // 2, heuristic, limit=20, scan=True, count=True)
    assert outcome.accesses == outcome.evaluations


def chain(policy, length):
    nodes = [Record(0, 8, 1, 0, ())]
    for _ in range(length):
        nodes.append(Record(0, 8, 1, 0, (nodes[-1],)))
    for node in nodes:
        policy.insert(node)
    return nodes


def evict(policy, *nodes):
    for node in nodes:
        node.resident = False
        policy.evicted(node)


def visited(policy):
    return accesses(policy) - policy.score_evaluations


def test_an_exact_neighbourhood_is_visited_when_it_is_rebuilt():
    policy = counting_policy(make_heuristic("h_dtr"), latest=False, scan=True)
    nodes = chain(policy, 5)
    evict(policy, nodes[1], nodes[2])
    before = visited(policy)
    policy.projected_cost(nodes[3])
    assert visited(policy) - before == 3  # nodes 2 and 1, and 0, where it ends
    policy.projected_cost(nodes[3])
    assert visited(policy) - before == 3  # cached
    evict(policy, nodes[4])
    before = visited(policy)
    policy.projected_cost(nodes[3])
    assert visited(policy) - before == 1  # its descendants alone are new


def test_a_component_is_visited_on_the_way_to_its_root():
    policy = counting_policy(make_heuristic("h_dtr_eq"), latest=False, scan=True)
    nodes = chain(policy, 5)
    evict(policy, nodes[1])
    before = visited(policy)
    policy.projected_cost(nodes[2])
    assert visited(policy) - before == 1
    evict(policy, nodes[2])
    before = visited(policy)
    policy.projected_cost(nodes[3])
    assert visited(policy) - before == depth(nodes[2].component)


def test_depth():
    nodes = [Record(0, 8, 1, 0, ()) for _ in range(3)]
    a, b, c = (Component(node, print) for node in nodes)
    a.parent, b.parent, c.parent = None, a, b
    assert [depth(one) for one in (a, b, c)] == [1, 2, 3]


def test_the_search_looks_at_less_than_the_scan():
    schedule = schedule_of(random_log(2, 400), "random")
    search, scan = (
        simulate(schedule, schedule.peak_bytes // 2, "h_dtr_local", limit=50, scan=scan, count=True)
        for scan in (False, True)
    )
    assert search.evaluations < search.accesses < scan.accesses
