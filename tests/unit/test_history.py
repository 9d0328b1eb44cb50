"""The search behind `core.history`, against plain recursion."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtrrun.core.history import _found


class Node:
    """Stands for a version: its answer, or those on which it depends."""

    def __init__(self, answer: bool | list[Node]) -> None:
        self.answer = answer

    def value(self, decisive: bool) -> bool:
        if isinstance(self.answer, bool):
            return self.answer
        return decisive if any(one.value(decisive) == decisive for one in self.answer) else not decisive


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    nodes: list[Node] = []
    for _ in range(draw(st.integers(1, 12))):
        if nodes and draw(st.booleans()):
            nodes.append(Node(draw(st.lists(st.sampled_from(nodes), max_size=4))))
        else:
            nodes.append(Node(draw(st.booleans())))
    return nodes


@given(graphs(), st.booleans(), st.randoms(use_true_random=False))
def test_it_finds_what_recursion_finds(nodes, decisive, random):
    known: dict[int, bool] = {}
    random.shuffle(nodes)
    for node in nodes:
        assert _found(node, known, lambda one: one.answer, decisive) == node.value(decisive)
    assert all(known[id(node)] == node.value(decisive) for node in nodes)


def test_no_node_is_looked_at_for_each_of_those_above_it():
    """Whether the deciding one is at the end of a long chain or there is none."""
    for end in (False, True):
        chain = [Node(end)]
        for _ in range(2000):
            chain.append(Node([chain[-1], Node(True)]))
        looks = 0

        def rule(node):
            nonlocal looks
            looks += 1
            return node.answer

        known: dict[int, bool] = {}
        for node in reversed(chain):
            assert _found(node, known, rule, decisive=False) == end
        assert looks < 3 * 2 * len(chain)
