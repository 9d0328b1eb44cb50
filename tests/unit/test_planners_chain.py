"""Treeverse and the dynamic program on chains, against each other, the closed form and exhaustive search."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import cheapest, graphs

from dtrrun.research.planners import Graph, Infeasible, Node, NotApplicable, chain, plan, residual, run
from dtrrun.research.planners.blocks import blocks
from dtrrun.research.planners.plan import keeps_order
from dtrrun.research.planners.treeverse import advances, split


def cost_of(name: str, graph: Graph, budget: int) -> int | None:
    """Return the cost of the planner's plan after checking the plan; None if it finds none."""
    try:
        found = plan(name, graph, budget)
    except Infeasible:
        return None
    cost, peak = run(graph, found)
    assert peak <= budget
    assert keeps_order(graph, found)
    return cost


@cache
def fewest_advances(steps: int, slots: int) -> float:
    """Return t(l, c) by its recurrence."""
    if steps == 1:
        return 0
    if slots == 0:
        return float("inf")
    return min(k + fewest_advances(steps - k, slots - 1) + fewest_advances(k, slots) for k in range(1, steps))


def test_the_closed_form_is_the_recurrence() -> None:
    for steps in range(1, 40):
        for slots in range(1, 10):
            assert advances(steps, slots) == fewest_advances(steps, slots)
    with pytest.raises(ValueError, match="without a slot"):
        advances(2, 0)


def test_splits_stay_inside() -> None:
    assert all(1 <= split(steps, slots) < steps for steps in range(2, 30) for slots in range(1, 8))


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 10, 17, 64])
def test_treeverse_and_the_programme_are_the_binomial_optimum_on_uniform_chains(layers: int) -> None:
    """Needed besides the slots: t̂_{i+1}, t̂_i and t_{i-1}; the first block's t_{i-1} takes no memory."""
    graph = chain(layers, loss=True)
    for budget in range(3, 20):
        expected = layers + 2 + advances(layers, budget - 2)
        assert cost_of("treeverse", graph, budget) == expected
        assert cost_of("chain_dp", graph, budget) == expected
    assert cost_of("chain_dp", graph, 1) is None


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_uniform_chains_exhaustively(layers: int, loss: bool) -> None:
    graph = chain(layers, loss=loss)
    for budget in range(1, 9):
        assert cost_of("chain_dp", graph, budget) == cheapest(graph, budget)


def test_a_residual_network_exhaustively() -> None:
    graph = residual(1, cost=3)
    for budget in range(2, 9):
        assert cost_of("chain_dp", graph, budget) == cheapest(graph, budget)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.booleans())
def test_on_heterogeneous_chains_little_is_lost(data: st.DataObject, layers: int, loss: bool) -> None:
    numbers = st.lists(st.integers(1, 9), min_size=layers, max_size=layers)
    graph = chain(layers, data.draw(numbers), data.draw(numbers), data.draw(numbers), loss=loss)
    for budget in (8, 12, 18, 30):
        least, found = cheapest(graph, budget), cost_of("chain_dp", graph, budget)
        if found is not None:
            assert least is not None
            assert least <= found <= 2 * least
        slots = cost_of("treeverse", graph, budget)
        if slots is not None:
            assert found is not None
            assert found <= slots


def test_unequal_layers_are_where_treeverse_falls_behind() -> None:
    costs = [100 if i % 8 == 0 else 1 for i in range(64)]
    graph = chain(64, costs, gradient_costs=[1] * 64)
    dp, equal = cost_of("chain_dp", graph, 14), cost_of("treeverse", graph, 14)
    assert dp is not None
    assert equal is not None
    assert dp < 0.8 * equal


def test_claims() -> None:
    exact = plan("chain_dp", chain(10), 5)
    assert (exact.claim, exact.among) == ("optimal", "persistent plans of the chain")
    assert exact.lower_bound == run(chain(10), exact).cost
    large = chain(10, sizes=[10**6 + i for i in range(10)])
    rounded = plan("chain_dp", large, 5 * 10**6, slots=64)
    assert (rounded.claim, rounded.lower_bound) == ("feasible", None)
    assert run(large, rounded).peak_bytes <= 5 * 10**6
    assert plan("treeverse", chain(10), 5).claim == "feasible"


def test_blocks_of_a_residual_network() -> None:
    first, second, third = blocks(residual(2))
    assert [first.everything, second.everything, third.everything] == [(0,), (1, 2, 3), (4, 5, 6)]
    assert (first.saved, second.saved, third.saved) == ((), (1,), (4, 6))
    assert second.advance_cost == 21
    assert second.reverse == (1,)
    assert (second.saved_size, second.advance_peak, second.all_peak) == (2, 2, 3)


def test_blocks_that_the_backward_pass_reads_together_are_one() -> None:
    f = [Node(1, 1, (i - 1,) if i else ()) for i in range(4)]
    graph = Graph((*f, Node(1, 1, (1, 3)), Node(1, 1, (0, 4), output=True)), 4)
    assert [block.everything for block in blocks(graph)] == [(0,), (1,), (2, 3)]
    graph = Graph((*f, Node(1, 1, (0, 3)), Node(1, 1, (3, 4), output=True)), 4)
    assert [block.everything for block in blocks(graph)] == [(0,), (1, 2, 3)]
    graph = Graph((*f, Node(1, 1, (0,)), Node(1, 1, (3, 4), output=True)), 4)
    assert [block.everything for block in blocks(graph)] == [(0,), (1, 2, 3)]


def test_no_backward_pass() -> None:
    with pytest.raises(NotApplicable):
        plan("treeverse", Graph((Node(1, 1), Node(1, 1, (0,))), 2), 10)


def test_unknown_planners() -> None:
    with pytest.raises(ValueError, match="unknown planner 'best': choose one of chen_sqrt, chen_greedy"):
        plan("best", chain(3), 10)


@given(graphs(most=8))
def test_any_graph_with_a_backward_pass_has_valid_plans(graph: Graph) -> None:
    for name in ("treeverse", "chain_dp"):
        try:
            cost = cost_of(name, graph, 100)
        except NotApplicable:
            continue
        assert cost == graph.total_cost or name == "treeverse"
        for budget in (4, 7, 11):
            cost, least = cost_of(name, graph, budget), cheapest(graph, budget)
            if cost is not None:
                assert least is not None
                assert least <= cost
