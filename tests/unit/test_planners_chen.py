"""Chen's √N and greedy planners."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from planner_world import cheapest, graphs

from dtrrun.research.planners import Graph, Infeasible, Node, chain, plan, residual, run
from dtrrun.research.planners.plan import keeps_order
from dtrrun.research.planners.segments import cuts

NAMES = ("chen_sqrt", "chen_greedy")


def test_articulation_points() -> None:
    assert cuts(chain(4)) == [0, 1, 2, 3]
    assert cuts(residual(2)) == [0, 3, 6]
    assert cuts(Graph((Node(1, 1), Node(1, 1, (0,)), Node(1, 1, (0,)), Node(1, 1, (2,))), 4)) == [0, 2, 3]


@pytest.mark.parametrize("layers", [9, 64, 200])
def test_sqrt_n_memory_for_one_more_forward_pass(layers: int) -> None:
    graph = chain(layers)
    root = math.isqrt(layers)
    cost, peak = run(graph, plan("chen_sqrt", graph, graph.total_cost))
    assert peak <= 2 * root + 4
    assert 2 * layers < cost <= 3 * layers


def test_segments_of_a_chain_by_hand() -> None:
    graph = chain(4)
    t = {f"t{i + 1}": i for i in range(4)}
    g4, g3, g2, g1 = range(4, 8)
    computes = [step.node for step in plan("chen_sqrt", graph, 99).steps if step.what == "compute"]
    # checkpoints t_2 and t_4; t_3 and then t_1 are recomputed
    assert computes == [*t.values(), t["t3"], g4, g3, t["t1"], g2, g1]


def test_greedy_uses_what_it_is_given() -> None:
    graph = chain(64)
    costs = [run(graph, plan("chen_greedy", graph, budget)).cost for budget in (18, 24, 32, 48)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0] <= 3 * 64


def test_no_plan_that_fits() -> None:
    with pytest.raises(Infeasible, match="chen_sqrt has no plan within 5 bytes: its plans need 15 bytes"):
        plan("chen_sqrt", chain(64), 5)


@pytest.mark.parametrize("name", NAMES)
def test_residual_networks(name: str) -> None:
    graph = residual(16)
    cost, peak = run(graph, plan(name, graph, 17))
    assert peak <= 17
    assert cost < 1.5 * graph.total_cost


@given(graphs(most=7))
def test_any_graph_has_plans_that_the_checker_accepts(graph: Graph) -> None:
    for name in NAMES:
        if not any(i < graph.turn for i in graph.operators):
            with pytest.raises(Infeasible, match="no forward pass"):
                plan(name, graph, 1000)
            continue
        found = plan(name, graph, 1000)
        cost, peak = run(graph, found)
        assert keeps_order(graph, found)
        least = cheapest(graph, peak)
        assert least is not None
        assert least <= cost
