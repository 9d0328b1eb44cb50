"""Runs one case plainly, counted, inside a budget, and inside it with every rematerialization verified."""

from dataclasses import dataclass, field

from tests.ecosystem.cases import Case
from tests.ecosystem.runs import Run, difference, inside, plain

STEP = 10
"""Percent of the plain peak, added while a budget is infeasible."""


@dataclass
class Outcome:
    """`problems` lists, in words, what the case should have shown but did not."""

    case: Case
    peak: int = 0
    budget: int = 0
    percent: int = 0
    evictions: int = 0
    rematerializations: int = 0
    slowdown: float = 0.0
    problems: list[str] = field(default_factory=list)


def check(case: Case) -> Outcome:
    outcome = Outcome(case)
    expected = plain(case)
    counted = inside(case, None)
    if _ended_well(outcome, "plain", expected) and _ended_well(outcome, "counted", counted):
        _compare(outcome, "counted", expected, counted)
        outcome.peak = counted.report["peak_bytes"]
        _inside_budget(outcome, expected)
    return outcome


def _inside_budget(outcome: Outcome, expected: Run) -> None:
    """Run inside `percent` of the peak, or the least feasible share above it."""
    case = outcome.case
    for percent in range(case.percent, 100, STEP):
        budget = outcome.peak * percent // 100
        found = inside(case, budget)
        if not found.infeasible:
            break
    else:
        outcome.problems.append(f"no budget below the peak was feasible: {found.report['error']}")
        return
    outcome.budget, outcome.percent = budget, percent
    if not _ended_well(outcome, "inside", found):
        return
    _compare(outcome, "inside", expected, found)
    _kept_to(outcome, found, budget)
    outcome.evictions = found.report["evictions"]
    outcome.rematerializations = found.report["rematerializations"]
    outcome.slowdown = found.step_seconds / expected.step_seconds
    verified = inside(case, budget, verify=True)
    if _ended_well(outcome, "verified", verified):
        _compare(outcome, "verified", expected, verified)
        _kept_to(outcome, verified, budget)
        verdict = verified.report["verify"]
        if verdict["mismatches"] or not verdict["storages"]:
            outcome.problems.append(f"verify: {verdict}")


def _ended_well(outcome: Outcome, name: str, run: Run) -> bool:
    if run.exit_code:
        last = run.stderr.strip().splitlines()[-12:]
        outcome.problems.append("\n".join([f"{name}: exit status {run.exit_code}", *last]))
    elif len(run.results) != outcome.case.processes:
        outcome.problems.append(f"{name}: {len(run.results)} processes wrote results")
    else:
        return True
    return False


def _compare(outcome: Outcome, name: str, expected: Run, found: Run) -> None:
    if told := difference(expected, found):
        outcome.problems.append(f"{name}: other bits: {told}")


def _kept_to(outcome: Outcome, run: Run, budget: int) -> None:
    """Check that each process kept to the budget, evicted, recomputed, and gave the expected warnings."""
    training = [process for process in run.report["processes"] if process["steps"] or process["evictions"]]
    if len(training) != outcome.case.processes:
        outcome.problems.append(f"{len(training)} processes ran under the budget")
    for process in training:
        if process["peak_bytes"] > budget or process["over_budget"]:
            outcome.problems.append(f"peak {process['peak_bytes']} is over the budget {budget}")
        if not process["evictions"] or not process["rematerializations"]:
            outcome.problems.append("nothing was evicted and recomputed: the case does not bite")
        texts = [warning["text"] for warning in process["warnings"]]
        for text in texts:
            if not text.startswith(outcome.case.warns or "\0"):
                outcome.problems.append(f"warned: {text}")
        for start in outcome.case.warns:
            if not any(text.startswith(start) for text in texts):
                outcome.problems.append(f"did not warn: {start}")
