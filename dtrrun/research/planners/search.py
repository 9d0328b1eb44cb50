"""Plans for graphs of any size, by search: run within the budget with foresight, then fill the room left.

This gives an upper bound on the optimum where a program for Checkmate's plans would be too large.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Sequence, Set
from itertools import product
from math import exp

from .demand import on_demand
from .fill import fill
from .graph import Graph
from .plan import Infeasible, Plan, in_order, missing_ancestors, run, with_frees

Rule = tuple[float, float, float, bool]
"""Exponents of cost, bytes and the time until the next use; and whether evicted ancestors add to the cost."""

RULES: tuple[Rule, ...] = (
    *product((0.5, 1.0), (0.5, 1.0), (0.5, 1.0), (True,)),
    *product((0.0, 0.5, 1.0), (0.0, 0.5, 1.0), (0.5, 1.0), (False,)),
)


def search(graph: Graph, budget_bytes: int, time_limit: float | None = None, seed: int = 0) -> Plan:
    """Return the cheapest plan found, in the program's order; claimed optimal only if the plain run fits.

    Runs the program within the budget, evicting the least cost^a / (bytes^b · time until next use^c), for
    several a, b and c, the cost with or without that of the node's evicted ancestors. With a time limit in
    seconds, it then changes weights of single nodes at random, keeps changes that do no harm, and stops when
    time is up and there is a plan; without one, the same graph always gives the same plan. The room that each
    run leaves is filled (`fill`). Raises Infeasible if nothing fits, which proves nothing.
    """
    began = time.monotonic()

    def over() -> bool:
        return time_limit is None or time.monotonic() - began > time_limit

    plain = in_order(graph)
    if run(graph, plain).peak_bytes <= budget_bytes:
        return Plan(plain.steps, "search", "optimal", plain.among, plain.lower_bound)
    next_use = _next_uses(graph)
    weights = [1.0] * len(graph)
    best: tuple[int, list[int], Rule] | None = None
    for rule in RULES:
        if best and time_limit is not None and over():
            break
        sequence = _attempt(graph, budget_bytes, next_use, rule, weights)
        if sequence and (best is None or _cost(graph, sequence) < best[0]):
            best = _cost(graph, sequence), sequence, rule
    if best is None:
        raise Infeasible(f"search found no plan within {budget_bytes} bytes; there may be one")
    cost, sequence, rule = best
    generator = random.Random(seed)
    while not over():
        changed = list(weights)
        number = min(len(graph.operators), generator.choice((1, 3, 9)))
        for index in generator.sample(graph.operators, number):
            changed[index] *= exp(generator.gauss(0, 1.5))
        other = _attempt(graph, budget_bytes, next_use, rule, changed)
        if other and _cost(graph, other) <= cost:
            cost, sequence, weights = _cost(graph, other), other, changed
    return Plan(with_frees(graph, sequence), "search")


def _attempt(
    graph: Graph,
    budget_bytes: int,
    next_use: Sequence[Sequence[int]],
    rule: Rule,
    weights: Sequence[float],
) -> list[int] | None:
    a, b, c, projected = rule
    fixed = [
        weight * (1 if projected else (node.cost + 1) ** a) / max(1, node.size) ** b
        for node, weight in zip(graph.nodes, weights, strict=True)
    ]
    end = len(graph.runs) + 1

    def worth(t: int, index: int, resident: Set[int]) -> tuple[float, ...]:
        uses = next_use[index]
        k = bisect_right(uses, t)
        value = fixed[index] / ((uses[k] if k < len(uses) else end) - t) ** c
        if projected:
            lost = missing_ancestors(graph, graph.reads[index], resident)
            value *= (_cost(graph, [index, *lost]) + 1) ** a
        return (value,)

    sequence = on_demand(graph, budget_bytes, worth)
    return sequence and fill(graph, sequence, budget_bytes)


def _next_uses(graph: Graph) -> list[list[int]]:
    """Return, for each node, the runs that read it."""
    stage = {index: t for t, made in enumerate(graph.runs) for index in made}
    return [[stage[user] for user in users] for users in graph.users]


def _cost(graph: Graph, sequence: Sequence[int]) -> int:
    return sum(graph.nodes[i].cost for i in sequence)
