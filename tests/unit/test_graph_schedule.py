"""A planner's graph as a schedule: DTR on it is a plan of the graph."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import cheapest, graphs, random_graph

from dtrrun.research.graph_schedule import schedule_of_graph
from dtrrun.research.planned import graph_of
from dtrrun.research.planners import Graph, Node, chain, group, in_order, lower_bound, run
from dtrrun.research.planners.plan import with_frees
from dtrrun.simulator.replay import Replay, ReplayOutcome, simulate
from dtrrun.simulator.schedule import schedule_of
from tests.unit.simulator_logs import random_log

HEURISTICS = ("h_dtr", "h_dtr_eq", "h_chain", "lru")


def computed(graph: Graph, budget: int, heuristic: str) -> tuple[ReplayOutcome, list[int]]:
    """Return DTR's outcome on the graph, and the nodes that it computed, in order."""
    schedule = schedule_of_graph(graph)
    runs: list[tuple[int, set[int]]] = []  # each operator run, and the storages that it allocated

    def seen(event: str, number: int) -> None:
        if event == "run":
            runs.append((number, set()))
        elif event == "compute":
            runs[-1][1].add(number)

    outcome = Replay(schedule, budget, heuristic, limit=inf, observer=seen).run()
    sequence: list[int] = []
    for number, fresh in runs[: len(runs) - (outcome.status != "ok")]:  # the last one found no room
        first, *others = schedule.operators[number].outputs
        if not graph.nodes[first].constant:
            sequence += [first, *(one for one in others if schedule.storage_of[one] in fresh)]
    return outcome, sequence


@settings(max_examples=150)
@given(graphs(), st.integers(0, 20), st.sampled_from(HEURISTICS))
def test_dtr_on_it_is_a_plan_of_the_graph(graph: Graph, budget: int, heuristic: str) -> None:
    schedule = schedule_of_graph(graph)
    assert schedule.cost == graph.total_cost
    plain = simulate(schedule, None, heuristic)
    assert plain.peak_bytes == schedule.peak_bytes == run(graph, in_order(graph)).peak_bytes
    outcome, sequence = computed(graph, budget, heuristic)
    if outcome.status == "ok":
        cost, peak_bytes = run(graph, with_frees(graph, sequence))
        assert cost == outcome.time
        assert peak_bytes <= outcome.peak_bytes <= budget
        least = cheapest(graph, budget)
        assert least is not None
        assert outcome.time >= least


def test_dtr_does_find_some_plans() -> None:
    """Otherwise the property above would hold vacuously."""
    generator, found = random.Random(3), 0
    for _ in range(100):
        graph = random_graph(generator)
        budget = run(graph, in_order(graph)).peak_bytes - 1
        outcome = simulate(schedule_of_graph(graph), budget, "h_dtr", limit=inf)
        found += outcome.status == "ok" and outcome.time > graph.total_cost
    assert found >= 5


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_a_grouped_log_stays_above_its_bound(heuristic: str) -> None:
    graph = graph_of(schedule_of(random_log(5), "random"))
    budget = int(run(graph, in_order(graph)).peak_bytes * 0.8)
    grouped = group(graph, 30, budget).graph
    bound = lower_bound(grouped, budget, 10)
    outcome = simulate(schedule_of_graph(grouped), budget, heuristic, limit=inf)
    assert outcome.plain_time == graph.total_cost
    assert bound is not None
    assert outcome.status != "ok" or outcome.time >= bound.cost


def test_a_workspace_is_made_room_for() -> None:
    graph = Graph((Node(1, 2), Node(1, 2), Node(1, 1, (1,), output=True, workspace=3)))
    schedule = schedule_of_graph(graph)
    assert [operator.workspace for operator in schedule.operators] == [0, 0, 3]
    assert schedule.peak_bytes == schedule.largest_bytes == 6
    assert simulate(schedule, 6, "lru").peak_bytes == 6
    assert simulate(schedule, 5, "lru").status == "oom"


def test_a_chain() -> None:
    schedule = schedule_of_graph(chain(4), "chain")
    assert schedule.name == "chain"
    assert schedule.events == [0, 1, 2, 3, ~3, 4, ~2, 5, ~1, ~4, 6, ~0, ~5, 7, ~6]
    assert schedule.backward == 5  # the event, not the operator
    assert schedule.outputs == [7]
