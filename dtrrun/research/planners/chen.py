"""Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost (2016)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .graph import Graph
from .plan import Infeasible, Plan, run, with_frees
from .segments import checkpointed, cuts

GREEDY_TRIES = 48


def chen_sqrt(graph: Graph, budget_bytes: int) -> Plan:
    """Return a plan with √N segments of equally many nodes, and a checkpoint at the end of each.

    Takes the checkpoints from the articulation points, or from all nodes of the forward pass, whichever
    gives the cheaper plan that fits. Raises Infeasible if neither fits; the planner has no other plan.
    """
    return _best(graph, budget_bytes, map(_evenly, _candidates(graph)), "chen_sqrt")


def chen_greedy(graph: Graph, budget_bytes: int) -> Plan:
    """Return a plan with a checkpoint wherever a segment exceeds b bytes: the cheapest one that fits.

    b is searched over a geometric grid between the smallest node and the sum of all, as Chen et al. propose.
    """
    tried: dict[tuple[int, ...], None] = {}
    for candidates in _candidates(graph):
        forward = [i for i in graph.operators if i < graph.turn]
        least = max(1, min(graph.nodes[i].size for i in forward))
        most = max(least + 1, sum(graph.nodes[i].size for i in forward))
        for step in range(GREEDY_TRIES + 1):
            segment_bytes = least * (most / least) ** (step / GREEDY_TRIES)
            tried[tuple(_greedy(graph, candidates, segment_bytes))] = None
    return _best(graph, budget_bytes, tried, "chen_greedy")


def _candidates(graph: Graph) -> list[list[int]]:
    """Return the lists of nodes to take checkpoints from: articulation points, then the linearized
    graph."""
    forward = [i for i in graph.operators if i < graph.turn]
    if not forward:
        return []
    narrow = cuts(graph)
    return [narrow, forward] if len(narrow) > 1 and narrow != forward else [forward]


def _evenly(candidates: Sequence[int]) -> list[int]:
    segments = max(1, math.isqrt(len(candidates)))
    ends = {round(len(candidates) * (k + 1) / segments) - 1 for k in range(segments)}
    return [candidates[end] for end in sorted(ends)]


def _greedy(graph: Graph, candidates: Sequence[int], segment_bytes: float) -> list[int]:
    allowed, found, held = set(candidates), [], 0
    for index in graph.operators:
        if index >= graph.turn:
            break
        held += graph.nodes[index].size
        if held > segment_bytes and index in allowed:
            found.append(index)
            held = 0
    return found


def _best(graph: Graph, budget_bytes: int, choices: Iterable[Sequence[int]], name: str) -> Plan:
    best: tuple[int, Plan] | None = None
    least = None
    for checkpoints in choices:
        plan = Plan(with_frees(graph, checkpointed(graph, checkpoints)), name)
        cost, peak = run(graph, plan)
        least = peak if least is None else min(least, peak)
        if peak <= budget_bytes and (best is None or cost < best[0]):
            best = cost, plan
    if best is None:
        tried = "there is no forward pass" if least is None else f"its plans need {least} bytes or more"
        raise Infeasible(f"{name} has no plan within {budget_bytes} bytes: {tried}")
    return best[1]
