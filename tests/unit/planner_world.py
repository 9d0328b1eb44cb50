"""Random graphs, and the cheapest plan by exhaustive search: the oracle for the static planners."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from itertools import combinations, count

from hypothesis import strategies as st

from dtrrun.research.planners import Graph, Node


def cheapest(graph: Graph, budget_bytes: int, any_order: bool = False) -> int | None:
    """Return the least cost of any plan that first computes the nodes in the program's order.

    With `any_order`, of any plan. Dijkstra over (nodes that ran, nodes resident), for a dozen nodes at most.
    """
    operators = graph.operators
    families: dict[int, list[int]] = {}  # an operator's outputs
    for i in operators:
        families.setdefault(i if (first := graph.nodes[i].partner) is None else first, []).append(i)
    firsts = list(families)
    outputs = {i for i in operators if graph.nodes[i].output}
    room = budget_bytes - graph.constant_bytes
    if room < 0:
        return None
    start = (frozenset[int](), frozenset[int]())
    least = {start: 0}
    ticket = count()
    queue = [(0, next(ticket), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > least[state]:
            continue
        ran, resident = state
        if len(ran) == len(firsts) and outputs <= resident:
            return cost
        used = sum(graph.nodes[i].size for i in resident)
        following = [((ran, resident - {i}), cost) for i in resident]
        for i, family in families.items():
            if not set(graph.reads[i]) <= resident:
                continue
            if i not in ran and not any_order and i != firsts[len(ran)]:
                continue
            for made in subsets(family):
                if i not in made or resident & made or (i not in ran and len(made) < len(family)):
                    continue
                peak, bytes_after = 0, used
                for k in sorted(made):
                    bytes_after += graph.nodes[k].size
                    peak = max(peak, bytes_after + graph.nodes[k].workspace)
                if peak <= room:
                    following.append(((ran | {i}, resident | made), cost + graph.nodes[i].cost))
        for state, total in following:
            if total < least.get(state, total + 1):
                least[state] = total
                heapq.heappush(queue, (total, next(ticket), state))
    return None


def subsets(family: list[int]) -> list[frozenset[int]]:
    return [frozenset(chosen) for k in range(len(family) + 1) for chosen in combinations(family, k)]


def random_graph(generator: random.Random, most: int = 7) -> Graph:
    """A graph as from `graphs`, for tests that count over many graphs."""
    nodes: list[Node] = []
    for index in range(generator.randint(3, most)):
        inputs = tuple(sorted(generator.sample(range(index), min(index, generator.randint(0, 3)))))
        output, workspace = generator.random() < 0.25, generator.choice((0, 0, 1, 3))
        nodes.append(Node(generator.randint(0, 9), generator.randint(0, 4), inputs, False, output, workspace))
    return Graph(tuple(nodes))


@st.composite
def graphs(draw: st.DrawFn, most: int = 6) -> Graph:
    """Any graph: constants, several outputs, workspaces, free operators and empty storages."""
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, most))):
        size = draw(st.integers(0, 4))
        if nodes and not nodes[-1].constant and draw(st.integers(0, 4)) == 0:
            first = index - 1 if (of := nodes[-1].partner) is None else of
            inputs = (*nodes[first].inputs, first)
            output = draw(st.booleans())
            for k in range(first, index):  # this output's memory is needed whenever the operator runs
                nodes[k] = replace(nodes[k], workspace=nodes[k].workspace + size)
            nodes.append(Node(0, size, inputs, output=output, partner=first))
            continue
        if draw(st.integers(0, 5)) == 0:
            nodes.append(Node(0, size, constant=True))
            continue
        inputs = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=3)))) if index else ()
        output = draw(st.integers(0, 3)) == 0
        workspace = draw(st.sampled_from((0, 0, 1, 3)))
        nodes.append(Node(draw(st.integers(0, 9)), size, inputs, output=output, workspace=workspace))
    return Graph(tuple(nodes), draw(st.sampled_from((None, len(nodes) // 2))))
