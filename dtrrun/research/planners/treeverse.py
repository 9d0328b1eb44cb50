"""Griewank, Walther: Algorithm 799, revolve (2000): the binomial schedule, in Griewank (1992) Treeverse."""

from __future__ import annotations

from functools import cache
from math import comb

from .blocks import Choice, blocks, emit
from .graph import Graph
from .plan import Infeasible, Plan, run, with_frees


@cache
def advances(steps: int, slots: int) -> int:
    """Return t(l, c), the least number of forward steps to reverse l steps with c slots, one for the start.

    A step that runs together with its reversal is not counted. t(l, c) is r·l - β(c + 1, r - 1), where
    β(c, r) = binomial(c + r, c) and r is the least with l ≤ β(c, r). Raises ValueError for more than one
    step without a slot.
    """
    if steps <= 1:
        return 0
    if slots < 1:
        raise ValueError(f"{steps} steps cannot be reversed without a slot")
    repeats = 0
    while comb(slots + repeats, slots) < steps:
        repeats += 1
    return repeats * steps - comb(slots + repeats, slots + 1)


@cache
def split(steps: int, slots: int) -> int:
    """Return how many steps to run before the next checkpoint is taken, 1 to steps - 1."""
    if slots == 1:
        return steps - 1
    return min(range(1, steps), key=lambda k: k + advances(steps - k, slots - 1) + advances(k, slots))


def treeverse(graph: Graph, budget_bytes: int) -> Plan:
    """Return the binomial schedule with the number of slots that gives the cheapest plan that fits.

    It assumes that all blocks are equal, as its authors do, so on other chains it need not be the best;
    `chain_dp` does not assume that. Raises Infeasible if it fits with no number of slots, NotApplicable
    without a backward pass.
    """
    chain = blocks(graph)
    best: tuple[int, Plan] | None = None
    least = None
    for slots in range(1, len(chain) + 1):
        plan = Plan(with_frees(graph, emit(chain, _choose, slots)), "treeverse")
        cost, peak = run(graph, plan)
        least = peak if least is None else min(least, peak)
        if peak <= budget_bytes and (best is None or cost < best[0]):
            best = cost, plan
    if best is None:
        raise Infeasible(f"treeverse has no plan within {budget_bytes} bytes: its plans need {least} or more")
    return best[1]


def _choose(s: int, t: int, slots: int) -> Choice:
    steps = t - s + 1
    return Choice(s + split(steps, slots) - 1, slots - 1, slots)
