"""A plan, and the strict checker that every plan must pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .graph import Graph

Claim = Literal["optimal", "feasible"]


class PlanStep(NamedTuple):
    what: Literal["compute", "free"]
    node: int


class PlanOutcome(NamedTuple):
    cost: int
    peak_bytes: int


@dataclass(frozen=True)
class Plan:
    """What to compute and free, in this order, and what is known about how good it is."""

    steps: tuple[PlanStep, ...]
    planner: str = ""
    claim: Claim = "feasible"
    """"feasible": the plan's cost is an upper bound on the optimum. "optimal": it is the optimum `among`."""
    among: str = "plans"
    """The plans among which it is optimal, in words."""
    lower_bound: float | None = None
    """No plan `among` costs less, if the planner has proved that."""


class InvalidPlan(ValueError):
    """The plan does something impossible."""


class Infeasible(ValueError):
    """The planner has no plan within the budget. The text says whether there may be one."""


class NotApplicable(ValueError):
    """The planner cannot plan this graph at all, whatever the budget."""


class Bound(NamedTuple):
    cost: float
    """In units of the graph's costs."""
    among: str


def run(graph: Graph, plan: Plan | Iterable[PlanStep]) -> PlanOutcome:
    """Execute the plan and return its cost and its peak in bytes, constants included.

    Strict. Raises InvalidPlan if an input is not resident, if something resident is computed or something
    absent freed, if a constant is computed or freed, if an output is missing at the end, or if an operator
    never ran at all (it may have effects: a loss that is printed). For the rules on partners, see Node.
    """
    steps = plan.steps if isinstance(plan, Plan) else plan
    resident = {i for i, node in enumerate(graph.nodes) if node.constant}
    ran: set[int] = set()
    cost, used = 0, graph.constant_bytes
    peak = used
    running = None  # the operator that ran last: its further outputs can be computed now
    for number, (what, index) in enumerate(steps):
        node = graph.nodes[index]
        if node.constant:
            raise InvalidPlan(f"step {number}: {what} of the constant {index}")
        if what == "free":
            if index not in resident:
                raise InvalidPlan(f"step {number}: {index} is freed, but not resident")
            resident.remove(index)
            used -= node.size
            continue
        if index in resident:
            raise InvalidPlan(f"step {number}: {index} is computed, but resident")
        if missing := [source for source in node.inputs if source not in resident]:
            raise InvalidPlan(f"step {number}: {index} is computed without its inputs {missing}")
        if node.partner is None:
            running = index
        elif running != node.partner:
            raise InvalidPlan(f"step {number}: {index} is computed without {node.partner} just before it")
        peak = max(peak, used + node.size + node.workspace)
        used += node.size
        cost += node.cost
        resident.add(index)
        ran.add(index)
    if missing := [i for i, node in enumerate(graph.nodes) if node.output and i not in resident]:
        raise InvalidPlan(f"the outputs {missing} are missing at the end")
    if missing := [i for i in graph.operators if i not in ran]:
        raise InvalidPlan(f"{missing} never ran")
    return PlanOutcome(cost, peak)


def keeps_order(graph: Graph, plan: Plan) -> bool:
    """Return whether the nodes are first computed in the program's order, as in every run of it."""
    computed = dict.fromkeys(index for what, index in plan.steps if what == "compute")
    return list(computed) == sorted(computed)


def with_frees(graph: Graph, computes: Sequence[int]) -> tuple[PlanStep, ...]:
    """Return the steps that compute these nodes in this order, with everything freed as early as possible.

    No other frees give the same computations a smaller peak, so planners need only say what to compute.
    """
    free_after: list[list[int]] = [[] for _ in computes]
    alive = {i for i, node in enumerate(graph.nodes) if node.output}
    for position in range(len(computes) - 1, -1, -1):
        index = computes[position]
        if index in alive:
            alive.remove(index)
        else:  # no reader
            free_after[position].append(index)
        for source in graph.reads[index]:
            if source not in alive:
                alive.add(source)
                free_after[position].append(source)
    steps: list[PlanStep] = []
    for position, index in enumerate(computes):
        steps.append(PlanStep("compute", index))
        steps.extend(PlanStep("free", done) for done in sorted(free_after[position]))
    return tuple(steps)


def missing_ancestors(graph: Graph, wanted: Iterable[int], resident: Set[int]) -> list[int]:
    """Return what must be computed, in order, to have `wanted` from what is resident (constants always
    are)."""
    found: set[int] = set()
    stack = [i for i in wanted if i not in resident and not graph.nodes[i].constant]
    while stack:
        index = stack.pop()
        if index not in found:
            found.add(index)
            stack.extend(source for source in graph.reads[index] if source not in resident)
            first = graph.nodes[index].partner
            if first is not None and first in resident:
                stack.append(first)  # its operator must run once more
    return sorted(found)


def in_order(graph: Graph) -> Plan:
    """Return the plan that runs each node once, as the program does: no plan costs less, and its peak is that
    without DTR."""
    steps = with_frees(graph, graph.operators)
    return Plan(steps, "none", "optimal", "all plans", float(graph.total_cost))


def refuse_the_impossible(graph: Graph, budget_bytes: int) -> None:
    """Raise Infeasible if the constants, or one operator with its inputs, are too large for the budget."""
    if graph.constant_bytes > budget_bytes:
        raise Infeasible(f"no plan fits into {budget_bytes} bytes: the constants take {graph.constant_bytes}")
    for index in graph.operators:
        node = graph.nodes[index]
        inputs = sum(graph.nodes[source].size for source in graph.reads[index])
        need = graph.constant_bytes + inputs + node.size + node.workspace
        if need > budget_bytes:
            raise Infeasible(f"no plan fits into {budget_bytes} bytes: operator {index} alone needs {need}")
