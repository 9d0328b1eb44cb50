"""Checkmate's ILP against exhaustive search, the chain's optimum, its own relaxation and a time limit."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planner_world import cheapest, graphs, random_graph

from dtrrun.research.planners import (
    PLANNERS,
    Graph,
    Infeasible,
    MissingExtra,
    Node,
    NotApplicable,
    Plan,
    chain,
    in_order,
    lp_bound,
    plan,
    residual,
    run,
)
from dtrrun.research.planners.plan import keeps_order
from dtrrun.research.planners.program import Program
from dtrrun.research.planners.rounding import rounded
from dtrrun.research.planners.stages import formulate


def optimum(graph: Graph, budget: int) -> int | None:
    """Return its plan's cost after checking that the plan is optimal; None if it proves there is none."""
    try:
        found = plan("checkmate", graph, budget, time_limit=20)
    except Infeasible:
        return None
    cost, peak = run(graph, found)
    assert peak <= budget
    assert keeps_order(graph, found)
    assert found.claim == "optimal"
    assert found.lower_bound is not None
    # The bounds are on plans in stages. A plan by another planner, not in stages, may cost less.
    staged = in_stages(graph, found)
    assert found.lower_bound == cost if staged else found.lower_bound >= cost
    try:
        relaxed = lp_bound(graph, budget)
    except Infeasible:
        assert not staged
    else:
        assert relaxed is not None
        assert relaxed.cost <= found.lower_bound
    return cost


def in_stages(graph: Graph, found: Plan) -> bool:
    """Return whether Checkmate can express the plan: from one first computation to the next, and from the
    last one to the end, nodes are computed in the program's order."""
    ends = {made[-1] for made in graph.runs}
    last = -1
    for what, index in found.steps:
        if what == "compute":
            if index <= last:
                return False
            last = index
            if index in ends:
                ends.remove(index)  # the next stage begins
                last = -1
    return True


OUTPUTS_BACK_TO_FRONT = Graph(
    (
        Node(0, 1, output=True),
        Node(0, 1, output=True, workspace=1),
        Node(0, 0, constant=True),
        Node(0, 0, (0,), output=True, workspace=1),
    )
)
"""At the end the second output must be recomputed before the first: in the program's order there is no
room for its workspace. No plan in stages fits into 2 bytes, but there is another one."""


@settings(max_examples=40)
@given(graphs(), st.integers(0, 6))
@example(OUTPUTS_BACK_TO_FRONT, 1)
def test_random_graphs_exhaustively(graph: Graph, less: int) -> None:
    budget = run(graph, in_order(graph)).peak_bytes - less
    found, least = optimum(graph, budget), cheapest(graph, budget)
    if found is not None:
        assert least is not None
        assert least <= found
    # A plan that is not in stages may be cheaper, or the only one: see below.


def test_most_random_graphs_need_no_other_plans() -> None:
    """Otherwise the ILP above would be a mere upper bound."""
    equal = other = 0
    for seed in range(60):
        graph = random_graph(random.Random(seed))
        budget = run(graph, in_order(graph)).peak_bytes - seed % 4
        if optimum(graph, budget) == cheapest(graph, budget):
            equal += 1
        else:
            other += 1
    assert equal >= 59, f"{other} differ"


def test_a_plan_that_is_not_in_stages() -> None:
    """After e, the outputs c and d are recomputed. There is no room for a, b and c together, so d must be
    computed before c, or a twice: neither is a plan in stages."""
    a, b, c, d = Node(1, 4), Node(1, 1, (0,)), Node(1, 4, (1,), output=True), Node(1, 3, (0,), output=True)
    graph = Graph((a, b, c, d, Node(1, 2, workspace=6)))
    with pytest.raises(Infeasible, match="in stages"):
        lp_bound(graph, 8)
    found = plan("checkmate", graph, 8)  # by another planner: no plan in stages costs less
    assert run(graph, found).cost == cheapest(graph, 8)
    assert optimum(graph, 12) == cheapest(graph, 12)


@pytest.mark.parametrize("budget", range(3, 10))
def test_small_chains_and_residual_networks(budget: int) -> None:
    for graph in (chain(4), chain(4, loss=True), chain(3, [5, 1, 3], [2, 1, 2], [4, 4, 1]), residual(1)):
        assert optimum(graph, budget) == cheapest(graph, budget)


def test_the_chains_optimum() -> None:
    for layers, budget in ((8, 3), (8, 5), (10, 6)):
        graph = chain(layers, loss=True)
        assert optimum(graph, budget) == run(graph, plan("chain_dp", graph, budget)).cost


def test_no_other_planner_is_better() -> None:
    graph = residual(3)
    for budget in (5, 7, 9):
        least = optimum(graph, budget)
        assert least is not None
        for name in PLANNERS:
            try:
                assert run(graph, plan(name, graph, budget)).cost >= least
            except Infeasible:
                assert name.startswith("chen")


def test_rounding_gives_plans_that_the_checker_accepts() -> None:
    graph = residual(6)
    budget = run(graph, in_order(graph)).peak_bytes * 3 // 4
    stages = formulate(graph, budget)
    relaxed = stages.program.solve(10, relaxed=True)
    found = rounded(graph, stages, relaxed.values, budget)
    assert found is not None
    cost, peak = run(graph, found)
    assert peak <= budget
    assert relaxed.bound is not None
    assert relaxed.bound * stages.total <= cost + 0.01
    assert keeps_order(graph, found)


def test_a_time_limit_leaves_a_plan_and_a_bound() -> None:
    graph = chain(24, loss=True)
    found = plan("checkmate", graph, 6, time_limit=2)
    assert found.claim == "feasible"
    cost, peak = run(graph, found)
    assert peak <= 6
    assert found.lower_bound is not None
    assert graph.total_cost <= found.lower_bound < cost


def test_infeasible_and_proved_to_be() -> None:
    with pytest.raises(Infeasible, match=r"operator \d+ alone needs 3"):
        plan("checkmate", chain(5), 2)
    two = Graph((Node(1, 3), Node(1, 2, (0,), output=True), Node(1, 2, (0,), output=True)))
    assert cheapest(two, 6) is None
    with pytest.raises(Infeasible, match="proved"):
        plan("checkmate", two, 6)
    with pytest.raises(Infeasible, match="the constants take 9"):
        lp_bound(Graph((Node(0, 9, constant=True),)), 8)


def test_outputs_recomputed_at_the_end() -> None:
    graph = Graph((Node(1, 4, output=True), Node(1, 1, (0,)), Node(1, 6, (1,), output=False)))
    assert optimum(graph, 8) == 4
    assert optimum(graph, 11) == 3


def test_bytes_that_are_not_small_numbers() -> None:
    sizes = [3 * 2**30 + 17, 2**28 + 3, 5 * 2**29, 2**30 + 1, 777_777_777]
    graph = chain(5, [10**8, 3 * 10**7, 10**6, 5 * 10**8, 10**7], sizes)
    for share in (6, 7, 8, 9):
        budget = run(graph, in_order(graph)).peak_bytes * share // 10
        assert optimum(graph, budget) == cheapest(graph, budget)


def test_planners_without_scipy_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtra, match="needs scipy: pip install scipy numpy"):
        lp_bound(chain(4), 3)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingExtra, match="needs numpy"):
        plan("chain_dp", chain(4), 3)
    assert run(chain(4), plan("treeverse", chain(4), 3)).peak_bytes <= 3


def test_a_program() -> None:
    """max 5x + 4y subject to 6x + 5y ≤ 10: the relaxation has x = 5/3, the integer optimum y = 2."""
    program = Program()
    x = program.variable(-5, high=9, whole=True)
    y = program.variable(-4, high=9, whole=True)
    program.row({x: 6, y: 5}, high=10)
    relaxed, whole = program.solve(5, relaxed=True), program.solve(5)
    assert relaxed.bound == pytest.approx(-25 / 3)
    assert whole.bound == pytest.approx(-8)
    assert [round(value) for value in whole.values] == [0, 2]
    program.at_least({x: 1}, {y: 1})
    program.row({y: 1}, low=1)
    assert program.solve(5).infeasible


def test_not_applicable_is_no_infeasible() -> None:
    assert not issubclass(NotApplicable, Infeasible)
