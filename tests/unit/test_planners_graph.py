"""Graphs for planners, and the functions that make them."""

from __future__ import annotations

import pytest

from dtrrun.research.planners import Graph, Node, Operator, chain, from_operators, in_order, residual, run


def test_the_chain_is_that_of_appendix_a() -> None:
    graph = chain(3)
    t1, t2, t3, g3, g2, _ = range(6)
    assert [node.inputs for node in graph.nodes] == [(), (t1,), (t2,), (t2,), (t1, g3), (g2,)]
    assert [node.output for node in graph.nodes] == [False] * 5 + [True]
    assert graph.turn == g3
    assert graph.users[t1] == (t2, g2)
    assert graph.users[t3] == ()
    assert graph.total_cost == 6
    # t_1, t_2 with t_3, or with t̂_3
    assert run(graph, in_order(graph)) == (6, 3)


def test_a_chain_with_its_loss() -> None:
    graph = chain(2, [3, 4], [5, 6], [7, 8], loss=True)
    t1, t2, g3, g2, _ = range(5)
    assert [node.inputs for node in graph.nodes] == [(), (t1,), (t2,), (t1, g3), (g2,)]
    assert [node.cost for node in graph.nodes] == [3, 4, 8, 8, 7]
    assert [node.size for node in graph.nodes] == [5, 6, 6, 6, 5]


def test_chains_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least one"):
        chain(0)
    with pytest.raises(ValueError, match="3 layers, but 2 costs"):
        chain(3, [1, 2])
    with pytest.raises(ValueError, match="at least one"):
        residual(0)


def test_a_residual_network_skips() -> None:
    graph = residual(2, cost=10, add_cost=1)
    x0, f1, g1, x1 = range(4)
    assert graph.nodes[x1].inputs == (x0, g1)
    assert graph.users[x0] == (f1, x1, 12)  # the last is f^
    assert graph.total_cost == 10 + 2 * 21 + 10 + 2 * 21 + 10
    assert graph.nodes[-1].output


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((Node(1, 1, (0,)),), "only what comes before"),
        ((Node(1, 1), Node(1, 1, (-1,))), "only what comes before"),
        ((Node(-1, 1),), "below zero"),
        ((Node(1, 1, constant=True),), "no inputs and no cost"),
        ((Node(1, 1), Node(1, 1), Node(0, 1, (0,), partner=0)), "not a further output of 0"),
        ((Node(1, 1), Node(1, 1, (0,), partner=0)), "not a further output of 0"),
        ((Node(1, 1), Node(0, 1, partner=0)), "not a further output of 0"),
    ],
)
def test_graphs_that_cannot_be(nodes: tuple[Node, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Graph(nodes)


@pytest.mark.parametrize("graph", [chain(5), chain(5, loss=True), chain(4, sizes=[9, 1, 7, 3]), residual(4)])
def test_where_the_backward_pass_begins_is_found_to_a_node(graph: Graph) -> None:
    guessed = Graph(graph.nodes).turn
    assert graph.backward is not None
    assert abs(guessed - graph.backward) <= 1


def test_from_operators() -> None:
    graph = from_operators(
        {"w": 100},
        [
            Operator(5, ["w"], {"a": 10}, "conv"),
            Operator(1, ["a"], {}, "view"),
            Operator(2, ["w"], {}, "view of a constant"),
            Operator(7, ["a", "a"], {"b": 4, "mask": 2}, "dropout"),
            Operator(3, ["mask"], {}, "view of a partner"),
            Operator(9, ["mask", "b", "w"], {"c": 1}, "backward"),
        ],
        outputs=["c", "w"],
        backward=5,
    )
    assert [(n.cost, n.size, n.inputs, n.output, n.name) for n in graph.nodes] == [
        (0, 100, (), False, "w"),
        (6, 10, (0,), False, "conv"),
        (10, 4, (1,), False, "dropout"),
        (0, 2, (1, 2), False, "dropout"),
        (9, 1, (0, 2, 3), True, "backward"),
    ]
    assert [(node.partner, node.workspace) for node in graph.nodes[2:4]] == [(None, 2), (2, 0)]
    assert (graph.turn, graph.operators, graph.constant_bytes) == (4, (1, 2, 3, 4), 100)
    assert graph.reads == ((), (), (1,), (1, 2), (2, 3))
