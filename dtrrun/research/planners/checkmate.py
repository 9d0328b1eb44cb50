"""Checkmate's optimum (Jain et al. 2020), its LP bound, and its rounding where only the LP was solved."""

from __future__ import annotations

import math
import time
from contextlib import suppress

from .bound import lower_bound
from .chain_dp import chain_dp
from .chen import chen_greedy
from .graph import Graph
from .plan import Bound, Infeasible, NotApplicable, Plan, in_order, refuse_the_impossible, run, with_frees
from .program import TOLERANCE
from .rounding import rounded
from .search import search
from .stages import Stages, computes, formulate
from .treeverse import treeverse

AMONG = "plans in stages"
"""Those that Checkmate can express: first computations in the program's order, and between two of them each
node recomputed at most once, in that order too."""

SMALL = 100
"""Up to this many nodes, trying all rules of `search` takes a negligible time."""


def checkmate(graph: Graph, budget_bytes: int, time_limit: float = 60.0, gap: float = 0.0) -> Plan:
    """Return the cheapest plan in stages, or the best one found within `time_limit` seconds.

    Plan.claim is "optimal" if that was proved to a relative `gap`, else "feasible"; either way,
    Plan.lower_bound is what was proved for plans in stages. The search starts from the best plan found by
    rounding the LP relaxation and by the other planners; if that is not in stages, "optimal" means that no
    plan in stages costs less. Raises Infeasible, whose text says whether that is proved, and MissingExtra
    without scipy.
    """
    deadline = time.monotonic() + time_limit
    plain = in_order(graph)
    if run(graph, plain).peak_bytes <= budget_bytes:
        return Plan(plain.steps, "checkmate", "optimal", AMONG, plain.lower_bound)
    refuse_the_impossible(graph, budget_bytes)
    best = _others(graph, budget_bytes, time_limit)
    stages = formulate(graph, budget_bytes)
    relaxed = stages.program.solve(time_limit * 0.5, relaxed=True)
    if relaxed.infeasible and best is None:
        raise Infeasible(f"no plan in stages fits into {budget_bytes} bytes: proved by the LP relaxation")
    bound = _proved(graph, stages, relaxed.bound)
    if elsewhere := lower_bound(graph, budget_bytes, time_limit=time_limit * 0.1):
        bound = max(bound or 0.0, elsewhere.cost)  # it holds for plans in stages too
    if relaxed.values is not None:
        best = _better(graph, best, rounded(graph, stages, relaxed.values, budget_bytes))
    if best is not None and bound is not None and run(graph, best).cost <= bound:
        return _finished(best, bound)
    return _search(graph, budget_bytes, stages, best, bound, deadline, gap)


def _search(
    graph: Graph,
    budget_bytes: int,
    stages: Stages,
    best: Plan | None,
    bound: float | None,
    deadline: float,
    gap: float,
) -> Plan:
    program = stages.program
    if best is not None:  # look only for cheaper plans
        cutoff = run(graph, best).cost - 1 + TOLERANCE
        terms = {v: program.costs[v] for row in stages.recompute for v in row}
        program.row(terms, high=cutoff / stages.total)
    left = deadline - time.monotonic()
    if left <= 0:
        return _unfinished(best, bound, budget_bytes)
    found = program.solve(left, gap=gap)
    if found.infeasible:
        if best is None:
            raise Infeasible(f"no plan in stages fits into {budget_bytes} bytes: proved")
        return _finished(best, float(run(graph, best).cost))
    bound = max((b for b in (bound, _proved(graph, stages, found.bound)) if b is not None), default=None)
    if best is not None and bound is not None:
        bound = min(bound, float(run(graph, best).cost))  # the solver looked only below that
    if found.values is not None:
        plan = Plan(with_frees(graph, computes(graph, stages, found.values)), "checkmate")
        if run(graph, plan).peak_bytes <= budget_bytes:
            if found.optimal:
                return _finished(plan, bound)
            best = _better(graph, best, plan)
        # else a row was violated within the tolerance
    return _unfinished(best, bound, budget_bytes)


def lp_bound(graph: Graph, budget_bytes: int, time_limit: float = 60.0) -> Bound | None:
    """Return the LP relaxation's lower bound on plans in stages; None if time ran out.

    Raises Infeasible if the relaxation has no solution: then no plan in stages fits.
    """
    refuse_the_impossible(graph, budget_bytes)
    stages = formulate(graph, budget_bytes)
    relaxed = stages.program.solve(time_limit, relaxed=True)
    if relaxed.infeasible:
        raise Infeasible(f"no plan in stages fits into {budget_bytes} bytes: proved by the LP relaxation")
    bound = _proved(graph, stages, relaxed.bound)
    return None if bound is None else Bound(bound, AMONG)


def _others(graph: Graph, budget_bytes: int, time_limit: float) -> Plan | None:
    best = None
    with suppress(Infeasible):
        best = search(graph, budget_bytes, time_limit * 0.1 if len(graph) > SMALL else None)
    for planner in (chen_greedy, treeverse, chain_dp):
        try:
            best = _better(graph, best, planner(graph, budget_bytes))
        except (Infeasible, NotApplicable):
            continue
    return best


def _better(graph: Graph, one: Plan | None, other: Plan | None) -> Plan | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda plan: run(graph, plan).cost)


def _proved(graph: Graph, stages: Stages, bound: float | None) -> float | None:
    """Return the bound in units of cost. Costs are whole, so it can be rounded up, less the tolerance."""
    if bound is None:
        return None
    return float(max(graph.total_cost, math.ceil(bound * stages.total * (1 - TOLERANCE) - TOLERANCE)))


def _finished(plan: Plan, bound: float | None) -> Plan:
    return Plan(plan.steps, "checkmate", "optimal", AMONG, bound)


def _unfinished(plan: Plan | None, bound: float | None, budget_bytes: int) -> Plan:
    if plan is None:
        raise Infeasible(f"no plan within {budget_bytes} bytes was found in the time; there may be one")
    return Plan(plan.steps, "checkmate", "feasible", AMONG, bound)
