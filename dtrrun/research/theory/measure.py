"""Measures the theorems: operations of a heuristic against N, and against the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from time import perf_counter

from dtrrun.core.heuristics import make_heuristic
from dtrrun.simulator.replay import Stopped

from ..planners.treeverse import advances
from .adversary import adversary
from .linear import linear
from .recorded import linear_schedule
from .replayed import Replayed

THEORIES = ("linear", "adversary")

SIZES: dict[str, Sequence[int]] = {
    "linear": (64, 256, 1024, 4096, 16384),
    "adversary": (64, 128, 256, 512, 1024),
}
HEURISTICS: dict[str, Sequence[str]] = {
    "linear": ("e_star", "h_dtr", "h_dtr_eq", "h_chain"),
    "adversary": ("e_star", "h_dtr", "h_dtr_eq", "lru"),
}
BUDGETS: dict[str, Sequence[int]] = {"linear": (), "adversary": (8, 32)}
"""In tensors. If empty: 2 ⌈√N⌉, as in App. A's figure."""
LEAST_BUDGET = 3
"""For linear, an operator's two inputs and its output; for adversary, t_0, a tensor and its input."""

LIMIT = {"linear": 5.0, "adversary": inf}
"""Multiple of the operations without a budget, above which a run is thrashing."""


@dataclass(frozen=True)
class TheoryCell:
    theory: str
    """One of THEORIES."""
    heuristic: str
    nodes: int
    """N: the number of App. A's layers, or of the nodes that the adversary reveals, t_0 included."""
    budget: int
    """B, in tensors."""
    limit: float = inf
    seed: int = 0


@dataclass(frozen=True)
class TheoryRow:
    """The operations that a heuristic needs on a network of N nodes in a budget of B tensors."""

    theory: str
    heuristic: str
    nodes: int
    budget: int
    status: str
    """ok, or thrash or oom if the run did not finish."""
    operations: int | None
    """Including rematerializations; None unless the status is ok."""
    per_node: float | None
    """operations / N."""
    optimum: int
    """Operations of the best static plan in that budget."""
    ratio: float | None
    """operations / optimum."""
    evictions: int
    rematerializations: int
    evaluations: int
    seconds: float


def root_budget(nodes: int) -> int:
    """Return B = 2 ⌈√N⌉."""
    return 2 * ceil(sqrt(nodes))


def theory_cells(
    theory: str,
    heuristics: Sequence[str],
    sizes: Sequence[int],
    budgets: Sequence[int],
    limit: float | None = None,
    seed: int = 0,
) -> list[TheoryCell]:
    """Return every possible combination, size by size. Without budgets, each size gets 2 ⌈√N⌉.

    limit: multiple of the operations without a budget; None: that of LIMIT. Raises ValueError if no
    combination is possible: the adversary needs more nodes than B.
    """
    found = [
        TheoryCell(theory, heuristic, nodes, budget, limit or LIMIT[theory], seed)
        for nodes in sizes
        for budget in budgets or (root_budget(nodes),)
        for heuristic in heuristics
        if theory == "linear" or nodes > budget
    ]
    if not found:
        raise ValueError("a network of N nodes takes a budget of less than N")
    return found


def run_theory(cell: TheoryCell) -> TheoryRow:
    """Run one cell. Raises ValueError for an unknown heuristic, or too few nodes or tensors."""
    started = perf_counter()
    linear_one = cell.theory == "linear"
    optimum = binomial_optimum(cell.nodes, cell.budget) if linear_one else cell.nodes - 1
    knows = linear_one and make_heuristic(cell.heuristic).foresight > 0
    engine = Replayed(
        cell.budget,
        cell.heuristic,
        most=cell.limit * (2 * cell.nodes if linear_one else cell.nodes - 1),
        previous=linear_schedule(cell.nodes) if knows else None,
        seed=cell.seed,
    )
    status = "ok"
    try:
        if linear_one:
            linear(engine, cell.nodes)
        else:
            _adversary(engine, cell)
    except Stopped as stopped:
        status = stopped.status
    replay, operations = engine.core, engine.operations if status == "ok" else None
    return TheoryRow(
        cell.theory,
        cell.heuristic,
        cell.nodes,
        cell.budget,
        status,
        operations,
        operations and operations / cell.nodes,
        optimum,
        operations and operations / optimum,
        replay.evictions,
        replay.rematerializations,
        replay.score_evaluations,
        perf_counter() - started,
    )


def _adversary(engine: Replayed, cell: TheoryCell) -> None:
    """Run the adversary. The optimum is to run each node once (`static_plan`), with t_0 free."""
    network = adversary(engine, cell.nodes, cell.budget)
    if network.missed:
        raise RuntimeError(f"{network.missed} nodes without an evicted path: the budget was not kept")


def binomial_optimum(layers: int, budget: int) -> int:
    """Return the least operations of any plan for App. A's network in `budget` tensors (Griewank and Walther
    2000).

    These are t_1, t_N, N gradients, and the forward steps that reverse the N - 1 layers in between with B - 2
    checkpoints; a gradient and a value take the other two tensors. Raises ValueError for a budget below 3.
    """
    if budget < LEAST_BUDGET:
        raise ValueError(
            f"a budget of {budget} tensors is too small for any network; the least is {LEAST_BUDGET}"
        )
    if budget >= layers:
        return 2 * layers
    return layers + 2 + advances(layers - 1, budget - 2)
