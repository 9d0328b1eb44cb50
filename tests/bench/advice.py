"""Runs each example in budgets that may be too small, and then in those that its errors advise."""

import gc
from collections.abc import Callable
from typing import Any

import torch

import dtrrun
from dtrrun.runtime.observe.expected import Sizes
from tests.bench.advised import PROGRAMS
from tests.bench.runs import TINY, inside, inside_once, share
from tests.bench.section import Section

SHARES = (60, 40, 30, 20)
ATTEMPTS = 3
STOP = {"DTRRUN_MAX_SLOWDOWN": "20", "DTRRUN_ON_THRASH": "stop"}

TEXT = """\
Each example runs unchanged inside a share of its plain peak. If that is too small, it runs again inside the
budget that the error advises to try. The cells show these budgets in percent of the plain peak; the example
trains inside the last one, or a step takes more than 20 times its own work ("thrashes")."""

SMALL = """

{programs} small programs of other kinds (`tests/bench/advised.py`) ran inside each tenth of their peaks
that is too small. Of {advised} budgets that their errors advised, {failed} were too small again, {above}
were above the peak, and {far_above} above it by more than the largest operator needs. In {unadvised} cases
the program had not begun to compute, so that no budget was advised."""


def measure(quick: bool) -> Section:
    shares = (30,) if quick else SHARES
    section = Section(
        "18. Following the advice", TEXT, ["Example", "Plain peak", *map("{} %".format, shares)]
    )
    for example in TINY:
        counted = inside_once(None, example, "--steps", "2")
        if counted.exit_code:
            section.missed.append(f"{example}: {counted.stderr[-1000:]}")
            continue
        peak = counted.report["peak_bytes"]
        row = [example, f"{peak / 1e6:.0f} MB"]
        for percent in shares:
            cell, wrong = follow(example, peak, share(percent, peak))
            row.append(cell)
            section.missed += [f"{example} at {percent} %: {wrong}"] if wrong else []
        section.rows.append(row)
    if not quick:
        section.text += SMALL.format(programs=len(PROGRAMS), **small())
    return section


def small() -> dict[str, int]:
    """Follow the advice in the programs of `advised.py`, from each tenth of their peak that is too small.

    Counts the advised budgets, and those too small, above the peak, or above it by more than the largest
    operator. `unadvised`: errors before a program has begun to compute, which name no budget.
    """
    counts = dict.fromkeys(("advised", "unadvised", "failed", "above", "far_above"), 0)
    for program in PROGRAMS:
        _, session = _attempt(program, None)
        peak = session.report()["peak_bytes"]
        operator = max(Sizes(one, set()).nbytes for one in session.slow_path.signatures.all())
        for percent in range(10, 100, 10):
            error, _ = _attempt(program, share(percent, peak))
            if error is None:
                continue
            budget = error.expected_bytes
            counts["advised" if budget else "unadvised"] += 1
            counts["failed"] += bool(budget) and _attempt(program, budget)[0] is not None
            counts["above"] += budget > peak
            counts["far_above"] += budget > peak + operator
    return counts


def _attempt(program: Callable[[], None], budget: int | None) -> tuple[dtrrun.BudgetError | None, Any]:
    gc.collect()  # leftovers of the last attempt would count as parameters
    torch.manual_seed(1)
    with dtrrun.budget(budget) as session:
        try:
            program()
        except dtrrun.BudgetError as error:
            return error.with_traceback(None), session
    return None, session


def follow(example: str, peak: int, budget: int) -> tuple[str, str]:
    """Return a cell of the table, and what is wrong with it, or ""."""
    tried = []
    while True:
        tried.append(f"{100 * budget / peak:.0f}")
        run = inside(budget, example, "--steps", "2", **STOP)
        if not run.infeasible or len(tried) == ATTEMPTS:
            break
        budget = run.report["error"]["expected_bytes"]
    cell = " → ".join(tried)
    if run.exit_code == 0:
        return cell, ""
    if "its own work" in run.stderr:
        return f"{cell}, thrashes", ""
    return f"{cell}, fails", run.stderr[-300:]
