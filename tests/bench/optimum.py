"""Heuristics against the optimum on the same graphs: chains, and logs with operators grouped."""

from functools import partial
from math import inf
from typing import Any

from dtrrun.research.graph_schedule import schedule_of_graph
from dtrrun.research.planned import NODES, graph_of
from dtrrun.research.planners import Graph, Infeasible, Plan, chain, group, lower_bound, plan, run
from dtrrun.simulator.portfolio import find
from dtrrun.simulator.replay import simulate
from dtrrun.simulator.schedule import Schedule, read_schedule
from dtrrun.simulator.sweep import log_name
from tests.bench.runs import ROOT
from tests.bench.section import Section

LAYERS, TENSORS = 64, (10, 13, 17, 25, 33)
SHARES = (0.75, 0.55)
HEURISTICS = ("h_dtr", "h_dtr_eq", "h_chain", "h_next")
MOST_OPERATORS = 1800
SECONDS = 100.0
"""The solvers' time for all logs together."""
MOST_SECONDS, BOUND_SECONDS = 10.0, 4.0
LIMIT = 10.0

TEXT = f"""\
The table compares the overhead of heuristics, of static plans, which know everything before the run, and of
proved bounds. The first graph is the linear network of App. A with {LAYERS} layers, at budgets of the given
number of tensors; its peak is {LAYERS}. The others are logs of the examples at
{" and ".join(map(str, SHARES))} of their peaks. Neighbouring operators are joined to at most {NODES} nodes,
if the budget allows it. All columns, including the heuristics, are for that graph, so they are not figures of
the original log. Logs of more than {MOST_OPERATORS} operators are left out.

`search` is the planner for large graphs. "Plan" is the best plan: on the chain, that of dynamic programming;
otherwise, that of Checkmate's integer program in at most {MOST_SECONDS:.0f} seconds. "Claim" says what the
plan is. *Optimal*: no run in the program's order is better (for the chain, no plan at all). *Optimal in
stages*: it is the best of Checkmate's plans; a run of DTR may not be one of these. *Feasible*: it exists, and
there may be a better one. "Bound": no run in the program's order, including those of DTR, has less overhead.
It is the bound of a relaxation, so the optimum lies between it and the least figure of the row. – : none
survives, or none was found. The last line shows geometric means of the overhead over the least in the row,
for the rows in which all heuristics survive."""


def optimum(logs: dict[str, Schedule], expected: dict[str, Any]) -> Section:
    headers = ["Graph, budget", *HEURISTICS, "portfolio", "search", "Plan", "Claim", "Bound"]
    section = Section("12. Against the optimum", TEXT, headers)
    excess: list[list[float]] = []
    linear = chain(LAYERS)
    for tensors in TENSORS:
        _row(section, excess, f"chain, {tensors}", linear, tensors, 0.0)
    if examples := sorted((ROOT / "tests" / "logs").glob("*.log*")):
        logs = {log_name(str(path)): read_schedule(path) for path in examples}
    small = {name: log for name, log in logs.items() if len(log.operators) <= MOST_OPERATORS}
    seconds = min(MOST_SECONDS, SECONDS / max(1, len(small) * len(SHARES)))
    for name, schedule in small.items():
        graph = graph_of(schedule)
        for share in SHARES:
            nbytes = int(schedule.peak_bytes * share)
            _row(section, excess, f"{name}, {share}", group(graph, NODES, nbytes).graph, nbytes, seconds)
    if excess:
        means = [_mean(column) for column in zip(*excess, strict=True)]
        section.rows.append(["mean over the least", *(f"{one:.4f}" for one in means), "", "", "", ""])
    return section


def _row(
    section: Section, excess: list[list[float]], name: str, graph: Graph, nbytes: int, seconds: float
) -> None:
    """Return a row. seconds: for Checkmate's solver; 0 for a chain, which needs none."""
    schedule = schedule_of_graph(graph)
    outcomes = [simulate(schedule, nbytes, one, limit=LIMIT) for one in HEURISTICS]
    outcomes.append(find(partial(simulate, schedule, nbytes), limit=LIMIT).outcome)
    found = [one.overhead if one.status == "ok" else None for one in outcomes]
    planner, options = ("checkmate", {"time_limit": seconds}) if seconds else ("chain_dp", {})
    searched, planned = _planned("search", graph, nbytes), _planned(planner, graph, nbytes, **options)
    static = [run(graph, one).cost / graph.total_cost if one else None for one in (searched, planned)]
    bound = _bound(graph, nbytes)
    least = min((one for one in (*found, *static) if one is not None), default=inf)
    claim = _claim(planned, static[1], bound, is_chain=not seconds)
    section.rows.append([name, *map(_overhead, (*found, *static)), claim, _overhead(bound)])
    if bound is not None and least < bound * (1 - 1e-6):
        section.missed.append(f"{name}: {least:.4f} is below the bound {bound:.4f}: one of them is wrong")
    if claim == "optimal" and static[1] is not None and least < static[1] * (1 - 1e-6):
        section.missed.append(
            f"{name}: {least:.4f} is below the optimum {static[1]:.4f}: one of them is wrong"
        )
    survivors = [one for one in found if one is not None]
    if len(survivors) == len(found):
        excess.append([one / least for one in survivors])


def _planned(name: str, graph: Graph, nbytes: int, **options: Any) -> Plan | None:
    try:
        return plan(name, graph, nbytes, **options)
    except Infeasible:
        return None


def _bound(graph: Graph, nbytes: int) -> float | None:
    try:
        found = lower_bound(graph, nbytes, time_limit=BOUND_SECONDS)
    except Infeasible:
        return None
    return found.cost / graph.total_cost if found else None


def _claim(planned: Plan | None, overhead: float | None, bound: float | None, is_chain: bool) -> str:
    if planned is None or overhead is None:
        return ""
    if (is_chain and planned.claim == "optimal") or (bound is not None and overhead <= bound * (1 + 1e-6)):
        return "optimal"
    return "optimal in stages" if planned.claim == "optimal" else "feasible"


def _overhead(overhead: float | None) -> str:
    return "–" if overhead is None else f"{overhead:.4f}"


def _mean(factors: tuple[float, ...]) -> float:
    product = 1.0
    for one in factors:
        product *= one
    return float(product ** (1 / len(factors)))
