"""Static planners' results for a log, for comparison (Sec. 4.3, Fig. 3).

They see the whole log before it runs, so they cannot handle dynamic programs; their results show how much
could be gained by foresight. In their plans a view comes and goes with its storage, at no extra cost, as in
dtrrun's own runtime; the replay of App. C has to recompute it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING

from dtrrun.simulator.schedule import CONSTANT, Schedule
from dtrrun.simulator.sweep import Budget, Facts, schedule_at

if TYPE_CHECKING:
    from .planners import Graph, Plan

LOWER_BOUND = "lower_bound"
NAMES = ("chen_sqrt", "chen_greedy", "treeverse", "chain_dp", "checkmate", "search", LOWER_BOUND)

NODES = 60
"""Most nodes for Checkmate's integer program: in a longer log, neighbouring operators are joined."""


@dataclass(frozen=True)
class PlanCell:
    path: str
    log: str
    planner: str
    """One of NAMES."""
    budget: Budget
    seconds: float = 60.0
    """Time limit for a solver."""


@dataclass(frozen=True)
class PlanRow:
    """A planner's result; overhead as in `sweep.Row`, None unless the status is ok.

    status: ok; oom: no plan within the budget was found; n/a: the planner cannot plan such a graph.
    """

    log: str
    planner: str
    budget_ratio: float
    budget_bytes: int
    status: str
    overhead: float | None
    claim: str
    """Whether the overhead is that of an `optimal` or `feasible` plan, or a `lower bound`; and among which
    plans."""
    bound: float | None
    """Lower bound on the overhead of such plans, if the planner has proved one."""
    nodes: int
    """Operators, or groups of them, in the planner's input."""
    seconds: float


def plan_cells(
    logs: Sequence[Facts], planners: Sequence[str], budgets: Sequence[Budget], seconds: float
) -> list[PlanCell]:
    """Return every combination, log by log."""
    return [
        PlanCell(log.path, log.log, planner, budget, seconds)
        for log in logs
        for planner in planners
        for budget in budgets
    ]


def run_planner(cell: PlanCell) -> PlanRow:
    """Run one planner. Raises LogError, OSError, and the planners' MissingExtra without scipy."""
    from .planners import Infeasible, NotApplicable

    started = perf_counter()
    schedule = schedule_at(cell.path)
    ratio, nbytes = cell.budget.of(schedule.peak_bytes)
    graph = graph_at(cell.path)
    status, cost, claim, bound, nodes = "ok", None, "", None, len(graph.runs)
    try:
        if cell.planner == LOWER_BOUND:
            cost, claim = _lower_bound(graph, nbytes, cell.seconds)
            status = "ok" if cost is not None else "n/a"
        else:
            cost, claim, bound, nodes = _planned(graph, nbytes, cell)
    except Infeasible as error:
        status, claim = "oom", str(error)
    except NotApplicable as error:
        status, claim = "n/a", str(error)
    plain = schedule.cost or 1
    spare = schedule.cost - graph.total_cost  # cost of views of constants, which the graph omits
    return PlanRow(
        cell.log,
        cell.planner,
        ratio,
        nbytes,
        status,
        (cost + spare) / plain if cost is not None else None,
        claim,
        (bound + spare) / plain if bound is not None else None,
        nodes,
        perf_counter() - started,
    )


def _planned(graph: Graph, nbytes: int, cell: PlanCell) -> tuple[float, str, float | None, int]:
    """Return cost, claim, bound, and number of nodes planned."""
    from .planners import plan, run
    from .planners.group import group

    if cell.planner != "checkmate":
        found = plan(cell.planner, graph, nbytes)
        return run(graph, found).cost, _claim(found), found.lower_bound, len(graph.runs)
    if len(graph.operators) <= NODES:
        found = plan("checkmate", graph, nbytes, time_limit=cell.seconds)
        return run(graph, found).cost, _claim(found), found.lower_bound, len(graph.runs)
    grouping = group(graph, NODES, nbytes)
    found = plan("checkmate", grouping.graph, nbytes, time_limit=cell.seconds)
    count = len(grouping.graph.runs)
    claim = f"feasible ({_claim(found)}, of {count} groups)"
    return run(graph, grouping.expand(found)).cost, claim, None, count


def _claim(found: Plan) -> str:
    return f"optimal among {found.among}" if found.claim == "optimal" else "feasible"


def _lower_bound(graph: Graph, nbytes: int, seconds: float) -> tuple[float | None, str]:
    from .planners import lower_bound

    found = lower_bound(graph, nbytes, time_limit=seconds)
    if found is None:
        return None, "no bound was found in time"
    return found[0], f"lower bound on {found[1]}"


@lru_cache(maxsize=4)
def graph_at(path: str) -> Graph:
    return graph_of(schedule_at(path))


def graph_of(schedule: Schedule) -> Graph:
    """Return the log as planners see it: one node per storage, in the program's order."""
    from .planners import Operator, from_operators

    place, nbytes = schedule.storage_of, schedule.nbytes
    constants: dict[Hashable, int] = {}
    operators: list[Operator] = []
    for one in schedule.operators:
        if one.name == CONSTANT:
            constants[place[one.outputs[0]]] = nbytes[place[one.outputs[0]]]
            continue
        viewed = [place[tensor] for tensor in one.outputs if schedule.is_alias(tensor)]
        reads = dict.fromkeys([*viewed, *(place[tensor] for tensor in one.inputs)])
        made = [place[tensor] for tensor in one.outputs if not schedule.is_alias(tensor)]
        operators.append(Operator(one.cost, reads, {x: nbytes[x] for x in made}, one.name))
    return from_operators(
        constants, operators, [place[tensor] for tensor in schedule.outputs], _forward(schedule)
    )


def _forward(schedule: Schedule) -> int | None:
    """Return how many operators, without constants, precede the backward pass, if the log marks it."""
    if schedule.backward is None:
        return None
    before = [event for event in schedule.events[: schedule.backward] if event >= 0]
    return sum(schedule.operators[event].name != CONSTANT for event in before)
