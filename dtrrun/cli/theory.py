"""`dtrrun simulate --theory`: measures the paper's theorems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dtrrun import values
from dtrrun.cli.profiles import Given
from dtrrun.cli.report_file import report_writer
from dtrrun.cli.sweeping import ended, import_from_here, print_and_write, run
from dtrrun.launch.errors import LaunchError
from dtrrun.research.figures import draw_theory
from dtrrun.research.theory import TheoryCell, run_theory, theory_cells
from dtrrun.research.theory.measure import BUDGETS, HEURISTICS, LEAST_BUDGET, SIZES
from dtrrun.simulator import PORTFOLIO
from dtrrun.views.theory import print_theory

if TYPE_CHECKING:
    from dtrrun.cli.simulate import Simulate

SCHEMA = "dtrrun.theory/1"


def read_theory(theory: str, given: Simulate) -> list[TheoryCell]:
    """Return the cells for the check `theory`.

    Options that are None take the theorem's defaults. Raises LaunchError.
    """
    heuristics: Sequence[str] = HEURISTICS[theory]
    if given.heuristic is not None:
        heuristics = Given(given.heuristic, "--heuristic").read(values.heuristics)
    if PORTFOLIO in heuristics:
        raise LaunchError(
            f"--heuristic: {PORTFOLIO} compares heuristics on a log, and cannot be combined with --theory"
        )
    layers, tensors = SIZES[theory], BUDGETS[theory]
    if given.sizes is not None:
        layers = Given(given.sizes, "--sizes").read(values.whole_numbers(least=1))
    if given.budgets is not None:
        tensors = Given(given.budgets, "--budgets").read(values.whole_numbers(LEAST_BUDGET))
    try:
        return theory_cells(theory, heuristics, layers, tensors, given.limit, given.seed)
    except ValueError as error:
        raise LaunchError(f"--sizes: {error}") from None


def simulate_theory(cells: Sequence[TheoryCell], jobs: int, folder: Path | None, given: Simulate) -> int:
    """Run the cells in `jobs` processes, print, write and draw.

    Returns the exit status. Raises LaunchError.
    """
    json, quiet = given.json, given.quiet
    import_from_here(cell.heuristic for cell in cells)
    with report_writer(json) as write:
        rows, done = run(run_theory, cells, jobs, None if quiet else "simulating")
        result = {"schema": SCHEMA, "theory": cells[0].theory, "rows": [asdict(row) for row in rows]}
        unwritten = print_and_write(result, print_theory, json, quiet, write)
    return ended(
        result, done, unwritten, f"{len(rows)} of {len(cells)}", draw_theory, folder, given.format, quiet
    )
