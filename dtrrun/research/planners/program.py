"""A mixed-integer program, built row by row and solved with HiGHS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .extra import numpy, optimize, sparse

Terms = Mapping[int, float]


TOLERANCE = 1e-6
"""HiGHS accepts rows as satisfied, and numbers as whole, if they are off by up to this."""


class Solution(NamedTuple):
    values: Any
    """One per variable (a numpy array), or None if no solution was found."""
    bound: float | None
    """No feasible point has a smaller objective; None if nothing was proved."""
    optimal: bool
    infeasible: bool
    """It was proved that there is no feasible point."""


class Program:
    """Minimize c·x over rows low ≤ a·x ≤ high, with x between its bounds. A class: built in steps."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.whole: list[int] = []
        self._entries: tuple[list[float], list[int], list[int]] = ([], [], [])
        self._row_low: list[float] = []
        self._row_high: list[float] = []

    def variable(self, cost: float = 0.0, low: float = 0.0, high: float = 1.0, *, whole: bool = False) -> int:
        self.costs.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def row(self, terms: Terms, low: float = float("-inf"), high: float = float("inf")) -> None:
        values, rows, columns = self._entries
        for column, value in terms.items():
            if value:
                values.append(value)
                rows.append(len(self._row_low))
                columns.append(column)
        self._row_low.append(low)
        self._row_high.append(high)

    def at_least(self, larger: Terms, smaller: Terms) -> None:
        """Add the row Σ larger ≥ Σ smaller."""
        terms = dict(larger)
        for column, value in smaller.items():
            terms[column] = terms.get(column, 0.0) - value
        self.row(terms, low=0.0)

    def solve(self, time_limit: float, *, relaxed: bool = False, gap: float = 0.0) -> Solution:
        """Return the optimum, or what is known after `time_limit` seconds. `relaxed`: of the LP relaxation.

        gap: the relative distance between bound and solution at which a solution counts as optimal.
        """
        np, scipy_optimize = numpy(), optimize()
        if not self.costs:
            return Solution(np.zeros(0), 0.0, True, False)
        values, rows, columns = self._entries
        shape = (len(self._row_low), len(self.costs))
        matrix = sparse().coo_matrix((values, (rows, columns)), shape=shape).tocsr()
        result = scipy_optimize.milp(
            np.array(self.costs),
            integrality=np.zeros(len(self.costs)) if relaxed else np.array(self.whole),
            bounds=scipy_optimize.Bounds(np.array(self.low), np.array(self.high)),
            constraints=scipy_optimize.LinearConstraint(matrix, self._row_low, self._row_high),
            options={"time_limit": max(0.01, time_limit), "mip_rel_gap": gap},
        )
        optimal = result.status == 0
        bound = result.get("mip_dual_bound")
        if relaxed or bound is None:
            bound = result.fun if optimal else None
        if bound is not None and not np.isfinite(bound):
            bound = None
        return Solution(result.x, bound, optimal, result.status == 2)
