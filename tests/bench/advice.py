"""Runs each example in budgets that may be too small, and then in those that its errors advise."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

import dtrrun
from dtrrun.runtime.observe.expected import STEPS
from tests.bench.advised import PROGRAMS
from tests.bench.runs import TINY, inside, inside_once, share
from tests.bench.section import Section

TITLE = "18. Following the advice"
SHARES = (60, 40, 30, 20)
PERCENT = range(10, 100, 10)
ATTEMPTS = 3
STOP = {"DTRRUN_MAX_SLOWDOWN": "20", "DTRRUN_ON_THRASH": "stop"}

TEXT = """\
Each example runs unchanged inside a share of its plain peak. If that is too small, it runs again inside the
budget that the error advises to try. The cells show these budgets in percent of the plain peak. Inside the
last one, the example trains, or its steps take more than 20 times their own work ("thrashes")."""

SMALL = """

{programs} small programs of other kinds (`tests/bench/advised.py`) ran inside each tenth of their peaks
that is too small, as a program that has never run, and as one that has run without a budget before.
{first}. {again}."""

COUNTS = """\
{who}, {failed} of {advised} budgets that their errors advised were too small again{told}, and {above} were
more than 2 % above the peak; the median was {median} % of the peak. In {unadvised} cases no budget was
advised"""

TOLD = """, {foreseen} of them only for what the errors said that they do not cover (a larger batch in an
evaluation, results that grow further, what has not run yet)"""


def measure(quick: bool, only: Sequence[str] = ()) -> Section:
    """only: names of examples, and of programs in `advised.py`, of which each budget is shown."""
    if only:
        return selected(only)
    shares = (30,) if quick else SHARES
    section = Section(TITLE, TEXT, ["Example", "Plain peak", *map("{} %".format, shares)])
    for example in TINY:
        counted = inside_once(None, example, "--steps", "2")
        if counted.exit_code:
            section.missed.append(f"{example}: {counted.stderr[-1000:]}")
            continue
        peak = counted.report["peak_bytes"]
        row = [example, f"{peak / 1e6:.0f} MB"]
        for percent in shares:
            told, wrong = follow(example, peak, share(percent, peak))
            row.append(told)
            section.missed += [f"{example} at {percent} %: {wrong}"] if wrong else []
        section.rows.append(row)
    if not quick:
        section.text += small()
    return section


def small() -> str:
    """Follow the advice in the programs of `advised.py`, from each tenth of their peak that is too small."""
    told = [
        COUNTS.format(who=who, told=TOLD.format(**found) if found["foreseen"] else "", **found)
        for who, found in (
            ("In programs that have never run", counts(knows=False)),
            ("In those that have", counts(knows=True)),
        )
    ]
    text = SMALL.format(programs=len(PROGRAMS), first=told[0], again=told[1])
    return "\n\n" + textwrap.fill(" ".join(text.split()), 108, break_on_hyphens=False)


def counts(*, knows: bool) -> dict[str, int]:
    """Count the advised budgets, and those too small or above the peak.

    knows: as if each program had run without a budget before. `foreseen`: those too small for what the error
    has said that it does not cover. `median`: of the advised budgets, in percent of the peaks. `unadvised`:
    errors before a program has begun to compute, which name no budget.
    """
    found = dict.fromkeys(("advised", "unadvised", "failed", "foreseen", "above"), 0)
    shares = []
    for program in PROGRAMS:
        peak = peak_of(program)
        for percent in PERCENT:
            tried = Tried.of(program, share(percent, peak), peak if knows else 0)
            if tried is None:
                continue
            found["advised" if tried.advised else "unadvised"] += 1
            found["failed"] += tried.failed
            found["foreseen"] += tried.foreseen
            found["above"] += tried.advised > 1.02 * peak
            shares += [100 * tried.advised / peak] if tried.advised else []
    return found | {"median": round(median(shares))}


class Tried(NamedTuple):
    """advised: the budget that an error has advised, 0 if none. failed: whether it was too small again.
    foreseen: for something else than the error has said that it is for."""

    advised: int
    failed: bool = False
    foreseen: bool = False

    @classmethod
    def of(cls, program: Callable[[], None], budget: int, known: int) -> Tried | None:
        """Run a program inside a budget, and inside the advised one; None if the first is enough."""
        error, session = attempt(program, budget, known)
        if error is None:
            return None
        if not error.expected_bytes:
            return cls(0)
        again, later = attempt(program, error.expected_bytes, known)
        if again is None:
            return cls(error.expected_bytes)
        further = later.ledger.age > session.ledger.age and later.steps.count >= session.steps.count
        of_steps = again.basis.startswith(STEPS.partition("{")[0])
        return cls(error.expected_bytes, True, bool(error.basis) and further and not of_steps)


def peak_of(program: Callable[[], None]) -> int:
    """Return what a program takes without a budget, in bytes."""
    nbytes: int = attempt(program, None)[1].report()["peak_bytes"]
    return nbytes


def selected(names: Sequence[str]) -> Section:
    """Return each advised budget of these programs, as percent of the peak. Raises KeyError."""
    small = {one.__name__: one for one in PROGRAMS}
    section = Section(TITLE, TEXT, ["Program", "Plain peak", *map("{} %".format, PERCENT)])
    for name in names:
        if name in TINY:
            peak = inside_once(None, name, "--steps", "2").report["peak_bytes"]
            cells = [follow(name, peak, share(one, peak))[0] if one in SHARES else "" for one in PERCENT]
        else:
            peak = peak_of(small[name])
            cells = [cell(peak, Tried.of(small[name], share(one, peak), 0)) for one in PERCENT]
        section.rows.append([name, f"{peak / 1e6:.1f} MB", *cells])
    return section


def cell(peak: int, tried: Tried | None) -> str:
    if tried is None or not tried.advised:
        return "runs" if tried is None else "none"
    fails = ", fails" + (" as said" if tried.foreseen else "")
    return f"{100 * tried.advised / peak:.0f}" + (fails if tried.failed else "")


class Known:
    """Stands in for the file with the peak that earlier runs of a command have seen."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read(self) -> int:
        return self.nbytes


def attempt(
    program: Callable[[], None], budget: int | None, known: int = 0
) -> tuple[dtrrun.BudgetError | None, Any]:
    """Run a program. Return its BudgetError, if it raises one, and the session.

    known: the peak that earlier runs have seen; 0: there were none. What an operator costs comes from the
    model, since what is evicted would depend on how busy the machine is.
    """
    gc.collect()  # leftovers of the last attempt would count as parameters
    torch.manual_seed(1)
    with dtrrun.budget(budget, cost="model") as session:
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
    told = " → ".join(tried)
    if run.exit_code == 0:
        return told, ""
    if "its own work" in run.stderr:
        return f"{told}, thrashes", ""
    return f"{told}, fails", run.stderr[-300:]
