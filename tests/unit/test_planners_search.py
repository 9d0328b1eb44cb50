"""Plans by search, and filling the memory that they leave free."""

from __future__ import annotations

import pytest
from hypothesis import given
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
    residual,
    run,
)
from dtrrun.research.planners.fill import fill, without_waste
from dtrrun.research.planners.plan import keeps_order, missing_ancestors, with_frees


@given(graphs(most=8), st.integers(0, 6))
def test_any_graph(graph: Graph, less: int) -> None:
    budget = run(graph, in_order(graph)).peak_bytes - less
    least = cheapest(graph, budget)
    try:
        found = plan("search", graph, budget)
    except Infeasible:
        return
    cost, peak = run(graph, found)
    assert keeps_order(graph, found)
    assert peak <= budget
    assert least is not None
    assert least <= cost


@pytest.mark.parametrize("graph", [chain(32, loss=True), chain(32, sizes=[1, 3, 2, 5] * 8), residual(12)])
def test_near_the_lower_bound_at_half_the_peak(graph: Graph) -> None:
    budget = run(graph, in_order(graph)).peak_bytes // 2
    bound = lower_bound(graph, budget, 10)
    assert bound is not None
    assert bound.cost <= run(graph, plan("search", graph, budget)).cost <= 1.15 * bound.cost


def test_the_same_plan_each_time_and_none_worse_with_time() -> None:
    graph = residual(8)
    first = plan("search", graph, 12)
    assert plan("search", graph, 12) == first
    longer = plan("search", graph, 12, time_limit=1.0)
    assert run(graph, longer).cost <= run(graph, first).cost


def test_no_plan() -> None:
    with pytest.raises(Infeasible, match="there may be one"):
        plan("search", chain(9), 2)


def test_what_fits_is_held() -> None:
    graph = Graph((Node(5, 4), Node(1, 2, (0,)), Node(1, 1, (1,)), Node(1, 1, (0, 2), output=True)))
    again = [0, 1, 2, 0, 3]
    assert run(graph, with_frees(graph, again)) == (13, 6)
    assert fill(graph, again, 6) == again
    assert fill(graph, again, 7) == [0, 1, 2, 3]
    assert run(graph, with_frees(graph, [0, 1, 2, 3])) == (8, 7)


def test_what_was_recomputed_for_it_goes_too() -> None:
    graph = Graph((Node(1, 9), Node(5, 1, (0,)), Node(1, 2), Node(1, 1, (1, 2), output=True)))
    again = [0, 1, 2, 0, 1, 3]
    assert fill(graph, again, 11) == [0, 1, 2, 1, 3]
    assert fill(graph, again, 12) == [0, 1, 2, 3]


def test_waste() -> None:
    graph = Graph((Node(1, 1), Node(1, 1), Node(1, 1, (0,), output=True)))
    assert without_waste(graph, [0, 1, 0, 1, 2, 0]) == [0, 1, 0, 2]
    assert without_waste(graph, [0, 1, 2]) == [0, 1, 2]


@given(graphs(most=8), st.data())
def test_filling_stays_inside_and_makes_nothing_dearer(graph: Graph, data: st.DataObject) -> None:
    computes: list[int] = []
    resident: set[int] = set()
    for made in graph.runs:
        again = missing_ancestors(graph, made, resident)
        computes += again
        resident |= set(again)
        resident -= data.draw(st.sets(st.sampled_from(sorted(resident))))
    computes += missing_ancestors(graph, [i for i, n in enumerate(graph.nodes) if n.output], resident)
    cost, peak = run(graph, with_frees(graph, computes))
    budget = peak + data.draw(st.integers(0, 4))
    filled = fill(graph, computes, budget)
    after = run(graph, with_frees(graph, filled))
    assert after.cost <= cost
    assert after.peak_bytes <= budget
    assert filled == fill(graph, filled, budget)
