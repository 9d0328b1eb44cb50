"""Each example from budgets that may be too small, and then in those that its errors advise to try."""

from tests.bench.runs import TINY, inside, inside_once, share
from tests.bench.section import Section

SHARES = (60, 40, 30, 20)
ATTEMPTS = 3
STOP = {"DTRRUN_MAX_SLOWDOWN": "20", "DTRRUN_ON_THRASH": "stop"}

TEXT = """\
Each example runs unchanged inside a share of its plain peak. If that is too small, it runs again inside the
budget that the error advises to try. The cells show these budgets in percent of the plain peak; the example
trains inside the last one, or a step takes more than 20 times its own work ("thrashes")."""


def measure(quick: bool) -> Section:
    shares = (30,) if quick else SHARES
    section = Section(
        "20. Following the advice", TEXT, ["Example", "Plain peak", *map("{} %".format, shares)]
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
    return section


def follow(example: str, peak: int, budget: int) -> tuple[str, str]:
    """A cell of the table, and what is wrong about it, or nothing."""
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
