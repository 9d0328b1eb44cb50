"""Rules in a run: the default, and those of ours, without and with knowledge of the step before."""

import json
import sys
import tempfile
from pathlib import Path

from tests.bench.runs import PATIENCE, ROOT, TINY, environment, finished, inside_once, share
from tests.bench.section import Section

SHARES = (60, 50, 40)
RULES = ("h_dtr_eq", "h_chain", "h_next")
STEPS = 6
"""`h_next` watches the second and the third step, and knows them from the fourth on."""

TEXT = f"""\
The table shows the recomputation in the last of {STEPS} steps as a share of the program's own operators,
inside a share of the peak, with {", ".join(RULES)}, in this order. "–" means that the budget is too small, or
that a step takes more than five times as long as its own work. For the GAN, the figures are those of the
network that steps last, which needs little."""


def measure(quick: bool) -> Section:
    shares = SHARES[1:2] if quick else SHARES
    section = Section("14. Rules in a run", TEXT, ["Example", *map("{} %".format, shares)])
    with tempfile.TemporaryDirectory() as folder:
        for example in TINY:
            peak = inside_once(None, example, "--steps", "2").report["peak_bytes"]
            row = [example]
            for percent in shares:
                budget = share(percent, peak)
                found = [recomputed(example, budget, rule, Path(folder, "report.json")) for rule in RULES]
                row.append(", ".join("–" if one is None else f"{100 * one:.0f} %" for one in found))
            section.rows.append(row)
    return section


def recomputed(example: str, budget: int, rule: str, report: Path) -> float | None:
    """Share of the last step's own operators, None if the run did not get there."""
    report.unlink(missing_ok=True)
    script = ROOT / "docs" / "examples" / f"{example}.py"
    options = ["--quiet", "--json", str(report), "--budget", f"{budget}B", "--heuristic", rule]
    limits = ["--max-slowdown", "5", "--on-thrash", "stop", "--max-steps", str(STEPS)]
    command = [sys.executable, "-m", "dtrrun", *options, *limits, sys.executable, str(script)]
    status, _, _ = finished([*command, "--steps", str(STEPS)], ROOT, environment(), PATIENCE)
    if status or not report.exists():
        return None
    seconds = json.loads(report.read_text())["processes"][0]["last_step"]["seconds"]
    return seconds["rematerialization"] / seconds["operators"]
