"""Plans from a fractional solution of Checkmate's program."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from .graph import Graph
from .plan import Plan, missing_ancestors, run, with_frees
from .stages import Stages

THRESHOLDS = (0.5, 0.3, 0.1, 0.7, 0.9, 0.02)

Worth = Callable[[int, int], tuple[float, ...]]
"""worth(t, node): at stage t, the resident node with the least of these is evicted first."""


def rounded(graph: Graph, stages: Stages, values: Any, budget_bytes: int) -> Plan | None:
    """The cheapest plan that fits of those made from S in two ways; None if none fits.

    Two-phase rounding (Jain et al. 2020): S is rounded at several thresholds, and R is the least that this
    S allows. And running the program inside the budget, evicting what S holds least of.
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
            yield sequence


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

    def now(t: int, node: int) -> tuple[float, ...]:
        return round(held[t + 1][number[node]], 3), -next_use(t, node)

    def at_next_use(t: int, node: int) -> tuple[float, ...]:
        use = next_use(t, node)
        return round(held[use][number[node]], 3), -use

    def mean(t: int, node: int) -> tuple[float, ...]:
        use = next_use(t, node)
        over = [held[at][number[node]] for at in range(t + 1, max(use, t + 1) + 1)]
        return round(sum(over) / len(over), 3), -use

    yield from (now, at_next_use, mean)


def on_demand(graph: Graph, budget_bytes: int, worth: Worth) -> list[int] | None:
    """What is computed if the program runs inside the budget, evicting by `worth` and as late as it can.

    None where what one operator needs does not fit with what is recomputed for it.
    """
    room = budget_bytes - graph.constant_bytes
    nodes = graph.nodes
    outputs = {i for i, node in enumerate(nodes) if node.output and not node.constant}
    done: list[int] = []
    resident: set[int] = set()
    for t in range(len(graph.runs) + 1):
        wanted = set(graph.runs[t]) if t < len(graph.runs) else outputs
        again = missing_ancestors(graph, wanted, resident)
        last_use = {i: k for k, i in enumerate(again)}
        for k, index in enumerate(again):
            last_use.update(dict.fromkeys(graph.reads[index], k))
        locked = wanted | set(last_use)
        last = graph.runs[t][-1] if t < len(graph.runs) else len(graph)
        for k, index in enumerate(again):
            resident.discard(index)  # an operator that runs again for a further output
            need = nodes[index].size + nodes[index].workspace
            used = sum(nodes[i].size for i in resident)
            free = sorted((i for i in resident if i not in locked), key=lambda i: worth(t, i))
            for victim in free:
                if used + need <= room:
                    break
                resident.remove(victim)
                used -= nodes[victim].size
            if used + need > room:
                return None
            done.append(index)
            resident.add(index)
            locked -= {i for i in (*graph.reads[index], index) if last_use[i] <= k and i not in wanted}
        for i in list(resident):
            if i not in outputs and (not graph.users[i] or graph.users[i][-1] <= last):
                resident.remove(i)
    return done
