"""The strict plan checker, and frees placed as early as possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_world import cheapest, graphs

from dtrrun.research.planners import Graph, InvalidPlan, Node, Plan, PlanStep, chain, in_order, run
from dtrrun.research.planners.plan import keeps_order, missing_ancestors, with_frees

WEIGHT, A, B, C = range(4)
GRAPH = Graph(
    (
        Node(0, 100, constant=True),
        Node(5, 10, (WEIGHT,)),
        Node(7, 4, (A,), workspace=30),
        Node(1, 2, (A, B), output=True),
    )
)


def steps(text: str) -> list[PlanStep]:
    return [PlanStep("free" if word[0] == "-" else "compute", int(word.lstrip("-"))) for word in text.split()]


def test_cost_and_peak() -> None:
    assert run(GRAPH, steps("1 2 3")) == (13, 100 + 10 + 4 + 30)
    assert run(GRAPH, steps("1 2 -1 1 3 -2 -1")) == (18, 144)
    no_workspace = Graph((*GRAPH.nodes[:B], Node(7, 4, (A,)), GRAPH.nodes[C]))
    assert run(no_workspace, steps("1 2 3")) == (13, 116)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("1 3", "computed without its inputs [2]"),
        ("1 2 -1 3", "computed without its inputs [1]"),
        ("1 1", "computed, but resident"),
        ("1 -2", "freed, but not resident"),
        ("-0", "free of the constant 0"),
        ("0", "compute of the constant 0"),
        ("1 2 3 -3", "the outputs [3] are missing"),
        ("1 2", "the outputs [3] are missing"),
    ],
)
def test_what_cannot_be_done(plan: str, text: str) -> None:
    with pytest.raises(InvalidPlan, match=text.replace("[", r"\[")):
        run(GRAPH, steps(plan))


def test_every_operator_runs() -> None:
    graph = Graph((Node(1, 1), Node(1, 1, output=True)))
    with pytest.raises(InvalidPlan, match=r"\[0\] never ran"):
        run(graph, steps("1"))


def test_first_computations_in_the_programs_order() -> None:
    graph = Graph((Node(1, 1), Node(1, 1)))
    assert keeps_order(graph, Plan(tuple(steps("0 -0 1 0"))))
    assert not keeps_order(graph, Plan(tuple(steps("1 0"))))


def test_frees_are_earliest() -> None:
    assert with_frees(GRAPH, [A, B, A, C]) == tuple(steps("1 2 -1 1 3 -1 -2"))
    assert with_frees(chain(2), [0, 1, 2, 3]) == tuple(steps("0 1 -1 2 -0 3 -2"))


@given(graphs(), st.data())
def test_earliest_frees_give_every_sequence_a_valid_plan(graph: Graph, data: st.DataObject) -> None:
    computes: list[int] = []
    resident: set[int] = set()
    for index in graph.operators:  # random frees, hence random recomputations
        again = missing_ancestors(graph, [index], resident)
        computes += again
        resident |= set(again)
        resident -= data.draw(st.sets(st.sampled_from(sorted(resident))))
    outputs = [i for i, node in enumerate(graph.nodes) if node.output]
    computes += missing_ancestors(graph, outputs, resident)
    plan = Plan(with_frees(graph, computes))
    cost, peak = run(graph, plan)
    assert cost == sum(graph.nodes[i].cost for i in computes)
    assert keeps_order(graph, plan)
    least = cheapest(graph, peak)
    assert least is not None
    assert least <= cost


@given(graphs())
def test_in_order_is_optimal_and_no_order_needs_less_memory_for_it(graph: Graph) -> None:
    plan = in_order(graph)
    cost, peak = run(graph, plan)
    assert cost == graph.total_cost == cheapest(graph, peak)
    if all(graph.nodes[i].cost for i in graph.operators):
        assert cheapest(graph, peak - 1) != cost


TWO_OUTPUTS = Graph(
    (
        Node(2, 3),
        Node(5, 4, (0,), workspace=1),
        Node(0, 1, (0, 1), partner=1),
        Node(1, 1, (1,)),
        Node(1, 1, (2,), output=True),
    )
)


def test_a_further_output_comes_with_its_operator() -> None:
    assert run(TWO_OUTPUTS, steps("0 1 2 -0 3 -1 4")) == (9, 8)
    assert run(TWO_OUTPUTS, steps("0 1 2 -2 3 -1 1 2 4")) == (14, 10)
    with pytest.raises(InvalidPlan, match="2 is computed without 1 just before it"):
        run(TWO_OUTPUTS, steps("0 1 2 -2 3 2 4"))


def test_an_operator_runs_again_for_a_further_output() -> None:
    assert missing_ancestors(TWO_OUTPUTS, [4], {0, 1, 3}) == [1, 2, 4]
    assert missing_ancestors(TWO_OUTPUTS, [4], {0, 1, 2}) == [4]
