"""The lower bound on every plan in the program's order is never above the result of exhaustive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import cheapest, graphs

from dtrrun.research.planners import (
    Graph,
    Infeasible,
    Node,
    chain,
    in_order,
    lower_bound,
    plan,
    run,
)


@settings(max_examples=100)
@given(graphs(), st.integers(0, 8), st.sampled_from((None, 1, 2, 3, 6)), st.booleans())
def test_never_above_the_cheapest_plan(graph: Graph, less: int, intervals: int | None, whole: bool) -> None:
    budget = run(graph, in_order(graph)).peak_bytes - less
    least = cheapest(graph, budget)
    try:
        bound = lower_bound(graph, budget, intervals, 10, whole=whole)
    except Infeasible:
        assert least is None
        return
    assert bound is not None
    assert bound.cost >= graph.total_cost
    if least is not None:
        assert bound.cost <= least


def test_plans_that_are_not_in_stages_are_bound_too() -> None:
    a, b, c, d = Node(1, 4), Node(1, 1, (0,)), Node(1, 4, (1,), output=True), Node(1, 3, (0,), output=True)
    graph = Graph((a, b, c, d, Node(1, 2, workspace=6)))
    bound = lower_bound(graph, 8, whole=True)
    least = cheapest(graph, 8)
    assert bound is not None
    assert least is not None
    assert 5 < bound.cost <= least


def test_how_near_it_comes() -> None:
    """On uniform chains of 32, the relaxation proves the binomial plan optimal at a third of the peak."""
    graph = chain(32, loss=True)
    bound = lower_bound(graph, 11)
    assert bound is not None
    assert bound.cost == run(graph, plan("treeverse", graph, 11)).cost
    fewer = lower_bound(graph, 11, 16)
    assert fewer is not None
    assert graph.total_cost < fewer.cost <= bound.cost


def test_whole_numbers_bound_better() -> None:
    graph = chain(8, loss=True)
    relaxed, whole = lower_bound(graph, 4), lower_bound(graph, 4, whole=True)
    least = run(graph, plan("chain_dp", graph, 4)).cost
    assert relaxed is not None
    assert whole is not None
    assert graph.total_cost < relaxed.cost < whole.cost <= least


def test_too_small_a_budget() -> None:
    with pytest.raises(Infeasible, match="alone needs"):
        lower_bound(chain(5), 2)
    two = Graph((Node(1, 4, output=True), Node(1, 4, output=True)))
    with pytest.raises(Infeasible, match="proved"):
        lower_bound(two, 6, whole=True)
