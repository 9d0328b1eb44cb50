"""Each example inside 100 to 30 % of its plain peak: the same bits, and never more bytes than the budget."""

from tests.bench.runs import TINY, Run, difference, inside_once, plain_once, share
from tests.bench.section import Section

SHARES = (100, 70, 50, 40, 30)
FEASIBLE_AT_40 = 6

TEXT = """\
Each example runs unchanged inside a share of its plain peak. "Equal" means that every line of output, every
parameter, buffer, gradient and optimizer state, and the final state of the random number generators are equal
to those of the plain run bit for bit, and that the peak was at most the budget. "Needs" means that the run
ended with the error that the budget is too small. The error names the least budget for the operator that
failed."""


def measure(quick: bool) -> Section:
    shares = (100, 50) if quick else SHARES
    arguments = ["--steps", "4" if quick else "6"]
    headers = ["Example", "Plain peak", *map("{} %".format, shares)]
    section = Section("1. Equal bits inside the budget", TEXT, headers)
    feasible = 0
    for example in TINY:
        reference = plain_once(example, *arguments)
        counted = inside_once(None, example, *arguments)
        if reference.exit_code or counted.exit_code:
            section.missed.append(f"{example}: {(reference.stderr or counted.stderr)[-1000:]}")
            continue
        peak = counted.report["peak_bytes"]
        row = [example, f"{peak / 1e6:.0f} MB"]
        for percent in shares:
            budget = share(percent, peak)
            run = inside_once(budget, example, *arguments)
            cell, wrong = judge(run, reference, budget)
            row.append(cell)
            feasible += percent == 40 and not wrong and not run.infeasible
            if wrong:
                section.missed.append(f"{example} at {percent} %: {wrong}")
        section.rows.append(row)
    if 40 in shares and feasible < FEASIBLE_AT_40:
        section.missed.append(f"{feasible} of {len(TINY)} are feasible at 40 %, should be {FEASIBLE_AT_40}")
    return section


def judge(run: Run, reference: Run, budget: int) -> tuple[str, str]:
    """Return a cell of the table, and what is wrong with the run, or ""."""
    if run.report and run.report["peak_bytes"] > budget:
        return "over", f"peak of {run.report['peak_bytes']:,} bytes over the budget of {budget:,}"
    if run.infeasible:
        return f"needs {run.report['least_budget_bytes'] / 1e6:.0f} MB", ""
    if run.exit_code or not run.capture:
        return "failed", f"exit status {run.exit_code}: {' '.join(run.stderr[-1000:].split())}"
    if different := difference(reference, run):
        return "differs", different
    return "equal", ""
