"""The paper's two theorems, measured."""

from typing import Any

from dtrrun.research.theory import THEORIES, TheoryRow, run_theory, theory_cells
from dtrrun.research.theory.measure import BUDGETS, HEURISTICS, SIZES
from dtrrun.simulator.schedule import Schedule
from tests.bench.section import Section

LINEAR, ADVERSARY = THEORIES
AT_MOST = 4
CONTRAST = ("lru", "size")
"""Heuristics without neighborhoods: no constant bounds these."""
CONTRAST_SIZES, CONTRAST_LIMIT = (64, 256, 1024), 500.0

THEOREM_1 = f"""\
The table shows the operations of one forward and one backward pass of a linear network of N layers in B = 2
⌈√N⌉ tensors, with App. A's banishing. In brackets, they are divided by N. A pass without a budget takes 2 N.
The optimum is the binomial one (Griewank and Walther 2000), for which the network must be known. `e_star`,
for which the theorem was proved, must stay within {AT_MOST} N, and so must all other heuristics that look at
the evicted neighbourhood. `lru` and `size`, which look at each storage alone, are for contrast: they do not
stay linear, and are measured for small N only."""

THEOREM_2 = """\
The table shows the operations on a network of N nodes that the adversary of App. B reveals, in B tensors. In
brackets, they are divided by those of the optimal static plan, which takes one path after the other and runs
each node once. According to the theorem, this ratio is at least of the order of N / B. It must not be below N
/ (2 B) for any heuristic. The adversary takes the shortest path that is completely evicted. All of these
heuristics leave it one each time, so all of them have the same cost."""


def theorem_1(logs: dict[str, Schedule], expected: dict[str, Any]) -> Section:
    heuristics = HEURISTICS[LINEAR] + ("msps", "h_next", *CONTRAST)
    section = Section("10. Theorem 1", THEOREM_1, ["N", "B", "Optimum", *heuristics])
    cells = theory_cells(LINEAR, [one for one in heuristics if one not in CONTRAST], SIZES[LINEAR], ())
    cells += theory_cells(LINEAR, CONTRAST, CONTRAST_SIZES, (), CONTRAST_LIMIT)
    rows = [run_theory(cell) for cell in cells]
    for nodes in SIZES[LINEAR]:
        found = {row.heuristic: row for row in rows if row.nodes == nodes}
        first = found[heuristics[0]]
        of_each = [_operations(found.get(one), "per_node") for one in heuristics]
        section.rows.append([f"{nodes:,}", str(first.budget), f"{first.optimum:,}", *of_each])
    for row in rows:
        if row.heuristic not in CONTRAST and (row.per_node is None or row.per_node > AT_MOST):
            section.missed.append(f"{row.heuristic}, N = {row.nodes}: {_operations(row, 'per_node')}")
    return section


def theorem_2(logs: dict[str, Schedule], expected: dict[str, Any]) -> Section:
    heuristics = HEURISTICS[ADVERSARY]
    section = Section("11. Theorem 2", THEOREM_2, ["N", "B", "N / B", "Optimum", *heuristics])
    rows = [
        run_theory(cell) for cell in theory_cells(ADVERSARY, heuristics, SIZES[ADVERSARY], BUDGETS[ADVERSARY])
    ]
    for nodes, budget in dict.fromkeys((row.nodes, row.budget) for row in rows):
        found = {row.heuristic: row for row in rows if (row.nodes, row.budget) == (nodes, budget)}
        optimum = found[heuristics[0]].optimum
        of_each = [_operations(found[one], "ratio") for one in heuristics]
        section.rows.append([f"{nodes:,}", str(budget), f"{nodes / budget:.4g}", f"{optimum:,}", *of_each])
    for row in rows:
        if row.ratio is None or row.ratio < row.nodes / row.budget / 2:
            section.missed.append(f"{row.heuristic}, N = {row.nodes}, B = {row.budget}: {row.ratio}")
    return section


def _operations(row: TheoryRow | None, relative: str) -> str:
    if row is None or row.operations is None:
        return "" if row is None else row.status
    return f"{row.operations:,} ({getattr(row, relative):.2f})"
