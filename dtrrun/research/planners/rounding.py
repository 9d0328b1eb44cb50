"""Plans from a fractional solution of Checkmate's program."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Set
from typing import Any

from .demand import Worth, on_demand
from .fill import fill
from .graph import Graph
from .plan import Plan, missing_ancestors, run, with_frees
from .stages import Stages

THRESHOLDS = (0.5, 0.3, 0.1, 0.7, 0.9, 0.02)


def rounded(graph: Graph, stages: Stages, values: Any, budget_bytes: int) -> Plan | None:
    """Return the cheapest plan that fits of those made from S in two ways; None if none fits.

    One is two-phase rounding (Jain et al. 2020): S is rounded at several thresholds, and R is the least that
    this S allows. The other runs the program within the budget, evicting what S holds least of.
    """
    best: tuple[int, Plan] | None = None
    for sequence in _sequences(graph, stages, values, budget_bytes):
        plan = Plan(with_frees(graph, sequence), "checkmate")
        cost, peak = run(graph, plan)
        if peak <= budget_bytes and (best is None or cost < best[0]):
            best = cost, plan
    return best and best[1]


def _sequences(graph: Graph, stages: Stages, values: Any, budget_bytes: int) -> Iterator[list[int]]:
    held = [[float(values[variable]) for variable in row] for row in stages.hold]
    for threshold in THRESHOLDS:
        yield _least_recomputation(graph, [[value > threshold for value in row] for row in held])
    for worth in _worths(graph, held):
        sequence = on_demand(graph, budget_bytes, worth)
        if sequence is not None:
            yield fill(graph, sequence, budget_bytes)


def _least_recomputation(graph: Graph, held: list[list[bool]]) -> list[int]:
    operators = graph.operators
    done: list[int] = []
    resident: set[int] = set()
    for t in range(len(graph.runs) + 1):
        first = set(graph.runs[t]) if t < len(graph.runs) else set()
        keep = {i for i, holds in zip(operators, held[t + 1], strict=False) if holds}
        again = missing_ancestors(graph, first | (keep - first), resident)
        done += again
        resident = (resident | set(again)) & keep
    return done


def _worths(graph: Graph, held: list[list[float]]) -> Iterator[Worth]:
    number = {index: k for k, index in enumerate(graph.operators)}
    stage = {index: t for t, made in enumerate(graph.runs) for index in made}
    stage_of = [[stage[user] for user in users] for users in graph.users]
    end = len(graph.runs)

    def next_use(t: int, node: int) -> int:
        uses = stage_of[node]
        k = bisect_right(uses, t)
        return uses[k] if k < len(uses) else end

    def now(t: int, node: int, _: Set[int]) -> tuple[float, ...]:
        return round(held[t + 1][number[node]], 3), -next_use(t, node)

    def at_next_use(t: int, node: int, _: Set[int]) -> tuple[float, ...]:
        use = next_use(t, node)
        return round(held[use][number[node]], 3), -use

    def mean(t: int, node: int, _: Set[int]) -> tuple[float, ...]:
        use = next_use(t, node)
        over = [held[at][number[node]] for at in range(t + 1, max(use, t + 1) + 1)]
        return round(sum(over) / len(over), 3), -use

    yield from (now, at_next_use, mean)
