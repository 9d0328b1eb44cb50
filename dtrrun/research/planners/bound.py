"""A lower bound on the cost of any run that keeps the program's order, as DTR does; for some hundred nodes.

The program is cut into intervals. R_{t,i} says that i is computed in interval t at least once, S_{t,i} that
it is resident at the boundary before t. A boundary is just after an operator was first computed, so that
operator's inputs are resident there too. Any run satisfies

    R_{t,k} ≤ R_{t,j} + S_{t,j}   for each input j of k         S_{t+1,i} ≤ S_{t,i} + R_{t,i}

With H_{t,i} ≥ S_{t+1,i} - R_{t,i} for what is held throughout interval t, the sum of H, an operator that runs
in t and the operator's inputs fits into the budget, and so does S_t. The least cost of such R and S is a
bound, and so is that of the LP relaxation. Unlike Checkmate's program (`stages`), this one does not fix in
which order an interval recomputes, or how often, so it holds for every plan; fewer intervals make a smaller
program with a weaker bound.
"""

from __future__ import annotations

import math
import time

from .graph import Graph
from .plan import Bound, Infeasible, refuse_the_impossible
from .program import TOLERANCE, Program

AMONG = "plans in the program's order"


INTERVALS = (5, 10, 20, 40)


def lower_bound(
    graph: Graph,
    budget_bytes: int,
    intervals: int | None = None,
    time_limit: float = 60.0,
    *,
    whole: bool = False,
) -> Bound | None:
    """Return a cost that no plan in the program's order can go below; None if time ran out.

    intervals: how many parts the program is cut into; None tries INTERVALS and, on a small graph, one per
    operator, and takes the best, since which is best varies. whole: solve the integer program instead of
    its relaxation, which takes far longer and gives a better bound; what was proved when time runs out
    counts. Raises Infeasible if it is proved that no such plan fits, and MissingExtra without scipy.
    """
    deadline = time.monotonic() + time_limit
    refuse_the_impossible(graph, budget_bytes)
    runs = len(graph.runs)
    tries = [*INTERVALS, *([runs] if runs <= 4 * INTERVALS[-1] else [])] if intervals is None else [intervals]
    best = None
    for k, parts in enumerate(sorted({max(1, min(runs, parts)) for parts in tries})):
        left = (deadline - time.monotonic()) / (len(tries) - k)
        if best is not None and left <= 0:
            break
        found = _bound(graph, budget_bytes, parts, left, whole)
        best = found if best is None or (found is not None and found > best) else best
    return None if best is None else Bound(best, AMONG)


def _bound(graph: Graph, budget_bytes: int, parts: int, time_limit: float, whole: bool) -> float | None:
    runs = len(graph.runs)
    lasts = sorted({-(-runs * (t + 1) // parts) for t in range(parts)})
    ends = [sum(map(len, graph.runs[:last])) for last in lasts]
    found = _formulate(graph, budget_bytes, ends, whole).solve(time_limit, relaxed=not whole)
    if found.infeasible:
        raise Infeasible(f"no plan in the program's order fits into {budget_bytes} bytes: proved")
    if found.bound is None:
        return None
    total = float(graph.total_cost or 1)
    bound = math.ceil(found.bound * total * (1 - TOLERANCE) - TOLERANCE)
    return float(max(graph.total_cost, bound))


def _formulate(graph: Graph, budget_bytes: int, ends: list[int], whole: bool) -> Program:
    program = Program()
    operators = graph.operators
    nodes = [graph.nodes[i] for i in operators]
    number = {index: k for k, index in enumerate(operators)}
    reads = [[number[s] for s in graph.reads[i]] for i in operators]
    n, total = len(nodes), float(graph.total_cost or 1)
    room = float(max(1, budget_bytes - graph.constant_bytes))
    size = [node.size / room for node in nodes]
    need = [size[k] + nodes[k].workspace / room + sum(size[j] for j in reads[k]) for k in range(n)]

    hold: dict[int, int] = {}  # S_t, by node; before the program begins nothing is resident
    for t in range(len(ends) + 1):  # the last one recomputes outputs
        start = ends[t - 1] if t else 0
        end = ends[t] if t < len(ends) else n
        recompute = [
            program.variable(nodes[i].cost / total, float(i >= start), whole=whole and i < start)
            for i in range(end)
        ]
        beside = {end - 1, *reads[end - 1]} if t < len(ends) and end else set()
        after = {}
        for i in range(end):
            there = i in beside or (t == len(ends) and nodes[i].output)
            after[i] = program.variable(0.0, float(there), whole=whole)
        for k in range(end):
            for j in reads[k]:
                program.at_least({recompute[j]: 1, **_term(hold, j)}, {recompute[k]: 1})
            program.at_least({recompute[k]: 1, **_term(hold, k)}, {after[k]: 1})
            if (first := nodes[k].partner) is not None:
                program.at_least({recompute[number[first]]: 1}, {recompute[k]: 1})
        workspace = nodes[end - 1].workspace / room if beside else 0.0
        program.row({after[i]: size[i] for i in range(end)}, high=1.0 - workspace)
        held = {i: program.variable() for i in hold if size[i]}  # H_t
        for i, variable in held.items():
            program.at_least({variable: 1, recompute[i]: 1}, {after[i]: 1})
        all_held = program.variable()
        program.row({all_held: 1.0, **{v: -size[i] for i, v in held.items()}}, 0.0, 0.0)
        for k in range(end):
            others = {held[i]: -size[i] for i in (k, *reads[k]) if i in held}
            program.row({all_held: 1.0, **others, recompute[k]: need[k]}, high=1.0)
        hold = after
    return program


def _term(row: dict[int, int], i: int) -> dict[int, float]:
    return {row[i]: 1.0} if i in row else {}
