"""What `dtrrun simulate --theory` does: the paper's theorems measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dtrrun.cli import values
from dtrrun.cli.parameters import read
from dtrrun.cli.report_file import report_writer, write_each
from dtrrun.cli.sweeping import ended, import_from_here, run, shown
from dtrrun.launch.errors import LaunchError
from dtrrun.simulator import PORTFOLIO
from dtrrun.simulator.figures import draw_theory
from dtrrun.simulator.theory import THEORIES, TheoryCell, run_theory, theory_cells
from dtrrun.simulator.theory.measure import BUDGETS, HEURISTICS, LEAST_BUDGET, SIZES
from dtrrun.views.theory import print_theory

SCHEMA = "dtrrun.theory/1"


def read_theory(
    theory: str, heuristic: str | None, sizes: str | None, budgets: str | None, limit: str | None, seed: str
) -> list[TheoryCell]:
    """What is meant by the options' texts, None: the theorem's own. Raises LaunchError."""
    theory = read("--theory", values.choice(*THEORIES), theory)
    heuristics: Sequence[str] = HEURISTICS[theory]
    if heuristic is not None:
        heuristics = read("--heuristic", values.heuristics, heuristic)
    if PORTFOLIO in heuristics:
        raise LaunchError(f"--heuristic: {PORTFOLIO} tries rules on a log, and does not go with --theory")
    numbers, tensors = values.whole_numbers(least=1), values.whole_numbers(LEAST_BUDGET)
    try:
        return theory_cells(
            theory,
            heuristics,
            read("--sizes", numbers, sizes) if sizes is not None else SIZES[theory],
            read("--budgets", tensors, budgets) if budgets is not None else BUDGETS[theory],
            read("--limit", values.slowdown, limit) if limit is not None else None,
            read("--seed", values.whole_number(), seed),
        )
    except ValueError as error:
        raise LaunchError(f"--sizes: {error}") from None


def simulate_theory(
    cells: Sequence[TheoryCell], jobs: int, json: str | None, folder: Path | None, format: str, quiet: bool
) -> int:
    """Runs the cells, prints, writes and draws; the exit status. Raises LaunchError."""
    import_from_here(cell.heuristic for cell in cells)
    with report_writer(json) as write:
        rows, done = run(run_theory, cells, jobs, None if quiet else "simulating")
        result = {"schema": SCHEMA, "theory": cells[0].theory, "rows": [asdict(row) for row in rows]}
        unwritten = write_each(
            {
                "standard output": lambda: shown(result, print_theory, json, quiet),
                "--json": lambda: write(result),
            }
        )
    return ended(result, done, unwritten, f"{len(rows)} of {len(cells)}", draw_theory, folder, format, quiet)
