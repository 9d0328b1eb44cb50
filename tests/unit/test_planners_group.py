"""Grouping: every plan of the grouped graph is a plan of the original, at no more cost and memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import cheapest, graphs

from dtrrun.research.planners import (
    PLANNERS,
    Graph,
    Infeasible,
    Node,
    NotApplicable,
    chain,
    group,
    in_order,
    lower_bound,
    plan,
    residual,
    run,
)
from dtrrun.research.planners.group import _grouped
from dtrrun.research.planners.plan import keeps_order


def readers(graph: Graph) -> int:
    return sum(bool(graph.users[i]) or graph.nodes[i].partner is None for i in graph.operators)


@settings(max_examples=100)
@given(graphs(most=9), st.integers(1, 8), st.integers(0, 6), st.sampled_from(["chen_greedy", "checkmate"]))
def test_every_grouped_plan_is_a_plan(graph: Graph, most: int, less: int, name: str) -> None:
    budget = run(graph, in_order(graph)).peak_bytes + 4 - less
    grouping = group(graph, most, budget)
    assert grouping.graph.total_cost == graph.total_cost
    assert grouping.graph.constant_bytes == graph.constant_bytes
    try:
        found = plan(name, grouping.graph, budget)
    except Infeasible:
        return
    cost, peak = run(grouping.graph, found)
    expanded = grouping.expand(found)
    fine_cost, fine_peak = run(graph, expanded)
    assert keeps_order(graph, expanded)
    assert fine_cost <= cost
    assert fine_peak <= peak <= budget
    least = cheapest(graph, budget)
    assert least is not None
    assert least <= fine_cost


@pytest.mark.parametrize("graph", [chain(64), chain(64, loss=True), residual(24)])
def test_as_few_nodes_as_asked_for(graph: Graph) -> None:
    budget = run(graph, in_order(graph)).peak_bytes // 2
    for most in (60, 30, 12):
        grouped = group(graph, most, budget).graph
        assert readers(grouped) <= most
        assert run(grouped, in_order(grouped)).peak_bytes <= 1.5 * run(graph, in_order(graph)).peak_bytes


def test_a_chain_that_can_stay_as_it_is() -> None:
    graph = chain(8)
    grouped = group(graph, 100, 100).graph
    assert [(n.cost, n.output) for n in grouped.nodes[1:]] == [(n.cost, n.output) for n in graph.nodes]
    # t_8, which nothing reads, is freed when its group has run
    assert [(n.size, n.workspace) for n in grouped.nodes[1:]] == [(1, 0)] * 7 + [(0, 1)] + [(1, 0)] * 8


def test_what_is_not_read_outside_is_workspace() -> None:
    wide = Graph((Node(1, 1), Node(2, 9, (0,)), Node(3, 1, (1,)), Node(4, 1, (2,), output=True)), 4)
    grouped = group(wide, 1, 100).graph
    assert [(n.cost, n.size, n.workspace) for n in grouped.nodes[1:]] == [(10, 1, 9)]


def test_what_is_read_by_others_is_kept_by_itself() -> None:
    graph = Graph((Node(1, 4), Node(1, 2, (0,)), Node(1, 1, (0,)), Node(1, 1, (1, 2), output=True)), 3)
    grouped = _grouped(graph, [[0, 1], [2], [3]], {0: 0, 1: 0, 2: 1, 3: 2}).graph
    assert [(n.cost, n.size, n.inputs, n.partner) for n in grouped.nodes[1:]] == [
        (2, 4, (), None),
        (0, 2, (1,), 1),
        (1, 1, (1,), None),
        (1, 1, (2, 3), None),
    ]


def test_the_turn_is_not_crossed() -> None:
    assert len(group(chain(8), 1, 1000).graph.runs) == 2


def test_a_group_too_large_for_the_budget_is_not_made() -> None:
    graph = residual(6)
    budget = 6
    grouped = group(graph, 2, budget).graph
    for node in grouped.nodes:
        assert sum(grouped.nodes[s].size for s in node.inputs) + node.size + node.workspace <= budget


def test_upper_and_lower_bound_of_a_network_of_two_hundred_nodes() -> None:
    graph = residual(32)
    budget = run(graph, in_order(graph)).peak_bytes // 2
    grouping = group(graph, 50, budget)
    costs = []
    for name in PLANNERS:
        if name != "checkmate":
            try:
                costs.append(run(graph, grouping.expand(plan(name, grouping.graph, budget))).cost)
            except (Infeasible, NotApplicable):
                continue
    bound = lower_bound(graph, budget, 10)
    assert bound is not None
    assert graph.total_cost < bound.cost <= min(costs) < 2 * graph.total_cost
