"""Static planners for comparison (Sec. 4.3): they see the whole graph before it runs.

graph = chain(64)
best = plan("chain_dp", graph, budget_bytes=16)
cost, peak_bytes = run(graph, best)             # the strict checker
best.claim, best.among                          # "optimal", "persistent plans of the chain"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .bound import lower_bound
from .chain_dp import chain_dp
from .checkmate import checkmate, lp_bound
from .chen import chen_greedy, chen_sqrt
from .extra import MissingExtra
from .graph import Graph, Node, Operator, chain, from_operators, residual
from .group import Grouping, group
from .plan import Bound, Infeasible, InvalidPlan, NotApplicable, Plan, PlanOutcome, PlanStep, in_order, run
from .search import search
from .treeverse import treeverse

__all__ = [
    "PLANNERS",
    "Bound",
    "Graph",
    "Grouping",
    "Infeasible",
    "InvalidPlan",
    "MissingExtra",
    "Node",
    "NotApplicable",
    "Operator",
    "Plan",
    "PlanOutcome",
    "PlanStep",
    "chain",
    "from_operators",
    "group",
    "in_order",
    "lower_bound",
    "lp_bound",
    "plan",
    "residual",
    "run",
]

PLANNERS: Mapping[str, Callable[..., Plan]] = {
    "chen_sqrt": chen_sqrt,
    "chen_greedy": chen_greedy,
    "treeverse": treeverse,
    "chain_dp": chain_dp,
    "checkmate": checkmate,
    "search": search,
}


def plan(name: str, graph: Graph, budget_bytes: int, **options: Any) -> Plan:
    """Return the plan of planner `name`, one of PLANNERS, for at most `budget_bytes`, including constants.

    options: the planner's own. Raises ValueError for an unknown name, Infeasible if the planner has no plan
    that fits, NotApplicable if it cannot plan such a graph, MissingExtra without numpy or scipy.
    """
    if name not in PLANNERS:
        raise ValueError(f"unknown planner {name!r}: choose one of {', '.join(PLANNERS)}")
    return PLANNERS[name](graph, budget_bytes, **options)
