"""Theorem 2: for any deterministic heuristic there is a network on which it costs Ω(N/B) times the optimum.

The network is not known in advance: each new node depends on what the heuristic has evicted (App. B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from ..planners.graph import Graph, Node
from ..planners.plan import Plan, with_frees
from .engine import Engine, H


@dataclass(frozen=True)
class Adversary(Generic[H]):
    root: H
    """t_0, which stays in memory."""
    paths: list[list[H]]
    """B paths from t_0's children on; each tensor is computed from the one before it."""
    order: list[int]
    """The path of each node, in the order in which they were revealed."""
    missed: int
    """Nodes revealed when no path was entirely evicted. 0 if the engine keeps to its budget."""


def adversary(engine: Engine[H], nodes: int, budget: int) -> Adversary[H]:
    """Reveal a network of `nodes` nodes, t_0 included, to an engine with a budget of `budget` tensors.

    First t_0, then its B children, then each time the next node of a path that has no resident tensor: with
    t_0 and B paths in a memory of B tensors, there always is one. Among several it extends the shortest, so
    that the cost holds for any engine, and is not one engine's bad luck. Nothing is released. Raises
    ValueError for a budget below 3 (t_0, a tensor and its input), or too few nodes.
    """
    if budget < 3:
        raise ValueError("a path needs a budget of at least 3 tensors: t_0, a tensor and its input")
    if nodes < budget + 1:
        raise ValueError(f"t_0 and {budget} children are {budget + 1} nodes, not {nodes}")
    root = engine.constant()
    paths: list[list[H]] = []
    order: list[int] = []
    missed = 0
    for number in range(nodes - 1):
        if number < budget:
            paths.append([engine.compute([root])])
            order.append(number)
            continue
        evicted = [k for k, path in enumerate(paths) if not any(map(engine.resident, path))]
        if not evicted:
            missed += 1
        chosen = min(evicted or range(budget), key=lambda k: (len(paths[k]), k))
        paths[chosen].append(engine.compute([paths[chosen][-1]]))
        order.append(chosen)
    return Adversary(root, paths, order, missed)


def least_cost(budget: int, nodes: int) -> int:
    """Return the least cost of any engine on `nodes` nodes revealed to it, t_0 free: Σ_j L_j (L_j + 1) / 2.

    The sum is least with paths of equal length: about N² / (2 B) (App. B). When revealed, the child at the
    head of a path costs 1, and the i-th node of a path costs i.
    """
    length, longer = divmod(nodes - 1, budget)
    of_length = length * (length + 1) // 2
    return budget * of_length + longer * (length + 1)


def revealed(network: Adversary[H]) -> Graph:
    """Return the network as a graph, nodes in the order in which they were revealed; t_0 is its constant.

    No node is an output: Theorem 2 requires only that each has run.
    """
    nodes = [Node(0, 1, constant=True, name="t0")]
    ends = [0] * len(network.paths)
    for path in network.order:
        nodes.append(Node(1, 1, (ends[path],), name=f"path {path + 1}"))
        ends[path] = len(nodes) - 1
    return Graph(tuple(nodes), backward=len(nodes))


def static_plan(network: Adversary[H]) -> Plan:
    """Return the optimum for the revealed network: path by path, each node once, in 3 units of memory.

    It may reorder the network, which no dynamic policy can. No plan costs less than running each node once.
    """
    graph = revealed(network)
    position: list[list[int]] = [[] for _ in network.paths]
    for index, path in enumerate(network.order):
        position[path].append(index + 1)
    steps = with_frees(graph, [index for path in position for index in path])
    return Plan(steps, "path by path", "optimal", "all plans", float(graph.total_cost))
