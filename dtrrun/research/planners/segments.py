"""Runs a graph from a set of checkpoints, as both of Chen's planners do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .graph import Graph
from .plan import missing_ancestors


def cuts(graph: Graph) -> list[int]:
    """Return the forward nodes after which no forward node reads anything computed before them.

    These are the articulation points among which, in Jain et al., planners for chains choose on networks
    with skip connections.
    """
    turn = graph.turn
    found: list[int] = []
    reach = -1  # the last forward reader of what came before
    for index in graph.operators:
        if index >= turn:
            break
        further = index + 1 < len(graph) and graph.nodes[index + 1].partner is not None
        if reach <= index and not further:
            found.append(index)
        forward = [user for user in graph.users[index] if user < turn]
        if forward:
            reach = max(reach, forward[-1])
    return found


def checkpointed(graph: Graph, checkpoints: Sequence[int]) -> list[int]:
    """Return the nodes computed, in order, if the forward pass keeps only `checkpoints`.

    The backward pass recomputes a segment, the nodes between two checkpoints, when it first needs one of its
    values, and holds what it will need of that segment (Chen et al. 2016). Values of other segments that were
    recomputed on the way, due to a skip connection, are dropped again.
    """
    turn, nodes = graph.turn, graph.nodes
    ends = sorted(checkpoints)
    kept = set(ends)
    computes: list[int] = []
    resident: set[int] = set()
    segment = -1
    for made in graph.runs:
        missing = missing_ancestors(graph, graph.reads[made[0]], resident)
        if made[0] >= turn and (again := [i for i in missing if i < turn]):
            segment = bisect_left(ends, again[-1])
        computes += [*missing, *made]
        resident.update(missing)
        resident.update(made)
        index = made[-1]
        for value in list(resident):
            users = graph.users[value]
            if nodes[value].output:
                continue
            if not users or users[-1] <= index:
                resident.remove(value)
            elif value < turn and value not in kept:
                if index < turn:
                    wanted = any(index < user < turn for user in users)
                else:
                    wanted = bisect_left(ends, value) == segment
                if not wanted:
                    resident.remove(value)
    return computes
