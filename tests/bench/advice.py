"""Runs each example in budgets that may be too small, and then in those that its errors advise."""

import gc
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import dtrrun
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
that is too small, as a program that has never run, and as one that has run without a budget before.
{first}. {again}."""

COUNTS = """\
{who}, {failed} of {advised} budgets that their errors advised were too small again, and {above} were more
than 2 % above the peak; the median was {median} % of the peak. In {unadvised} cases no budget was advised"""


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
        section.text += small()
    return section


def small() -> str:
    """Follow the advice in the programs of `advised.py`, from each tenth of their peak that is too small."""
    told = [
        COUNTS.format(who=who, **counts(knows=knows))
        for who, knows in (("In programs that have never run", False), ("In those that have", True))
    ]
    return SMALL.format(programs=len(PROGRAMS), first=told[0], again=told[1])


def counts(*, knows: bool) -> dict[str, int]:
    """Count the advised budgets, and those too small or above the peak.

    knows: as if each program had run without a budget before. `median`: of the advised budgets, in percent of
    the peaks. `unadvised`: errors before a program has begun to compute, which name no budget.
    """
    found = dict.fromkeys(("advised", "unadvised", "failed", "above"), 0)
    shares = []
    for program in PROGRAMS:
        _, session = _attempt(program, None)
        peak = session.report()["peak_bytes"]
        for percent in range(10, 100, 10):
            error, _ = _attempt(program, share(percent, peak), peak if knows else 0)
            if error is None:
                continue
            budget = error.expected_bytes
            found["advised" if budget else "unadvised"] += 1
            found["failed"] += bool(budget) and _attempt(program, budget)[0] is not None
            found["above"] += budget > 1.02 * peak
            shares += [100 * budget / peak] if budget else []
    return found | {"median": round(median(shares))}


class Known:
    """Stands in for the file with the peak that earlier runs of a command have seen."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read(self) -> int:
        return self.nbytes


def _attempt(
    program: Callable[[], None], budget: int | None, known: int = 0
) -> tuple[dtrrun.BudgetError | None, Any]:
    gc.collect()  # leftovers of the last attempt would count as parameters
    torch.manual_seed(1)
    with dtrrun.budget(budget) as session:
        session._peak = Known(known)
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
