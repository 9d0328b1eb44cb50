"""The simulator's predictions from a recorded log of each example, against the live run."""

import json
import sys
import tempfile
from pathlib import Path

from dtrrun.core.heuristics import STEADY
from dtrrun.core.host import expected_host
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import read_log
from tests.bench.runs import PATIENCE, ROOT, TINY, environment, finished, share
from tests.bench.section import Section

SHARES = (70, 50, 40)
WITH_A_FILE = (15, 8)
FILE_BYTES = 4 * 10**9
STEPS = 4
POINTS = 10
LIMIT = 20.0

TEXT = """\
Before the semicolon, the table says whether a prediction from one log (`dtrrun record --step 1-4 --cost
model`) is "equal" to the live run: the evictions, rematerializations and peak of a whole run of 4 steps with
`--cost model`. "Too small" means that both end with the same error. "Thrashes" means that the prediction was
given up. After the semicolon is the recomputation as a share of the program's own operators, with measured
costs: first as predicted from a log of steps 2 to 4, then as measured in the live run. dtrrun's own
bookkeeping is neither counted nor predicted. Budgets are shares of the recorded peak. In those "with a
file", what can't be recomputed, or takes longer than copies, may leave for one, and the copies are compared,
too: how many there were, out and back, and the predicted time of copies and recomputation in percent of the
program's."""


def measure(quick: bool) -> Section:
    shares = (50,) if quick else SHARES
    headers = [*map("{} %".format, shares), *map("{} %, with a file".format, WITH_A_FILE)]
    section = Section("9. Predicted and live", TEXT, ["Example", "Peak", *headers])
    with tempfile.TemporaryDirectory() as folder:
        for example in TINY:
            modelled = recorded(example, Path(folder, "modelled.log"), "1-4", "model")
            measured = recorded(example, Path(folder, "measured.log"), "2-4", "measured")
            if isinstance(modelled, str) or isinstance(measured, str):
                section.missed.append(f"{example}: {modelled if isinstance(modelled, str) else measured}")
                continue
            peak = predict(modelled, None).peak_bytes
            row = [example, f"{peak / 1e6:.0f} MB"]
            for percent in shares:
                budget = share(percent, peak)
                cell, wrong = judged(example, budget, modelled, measured, Path(folder, "report.json"))
                row.append(cell)
                if wrong:
                    section.missed.append(f"{example} at {percent} %: {wrong}")
            for percent in WITH_A_FILE:
                cell, wrong = with_a_file(example, share(percent, peak), modelled, Path(folder))
                row.append(cell)
                if wrong:
                    section.missed.append(f"{example} at {percent} % with a file: {wrong}")
            section.rows.append(row)
    return section


def recorded(example: str, path: Path, steps: str, cost: str):
    """Return the log's instructions, or what went wrong."""
    options = ["record", "--quiet", "-o", str(path), "--step", steps, "--cost", cost]
    status, stderr, _ = finished(command(options, example), ROOT, environment(), PATIENCE)
    return stderr[-1000:] if status else read_log(path)


def command(options: list[str], example: str) -> list[str]:
    script = ROOT / "docs" / "examples" / f"{example}.py"
    return [sys.executable, "-m", "dtrrun", *options, sys.executable, str(script), "--steps", str(STEPS)]


def live(example: str, budget: int, cost: str, path: Path, *more: str) -> dict:
    options = ["--quiet", "--json", str(path), "--budget", f"{budget}B", "--cost", cost, *more]
    path.unlink(missing_ok=True)
    finished(command([*options, "--max-steps", str(STEPS)], example), ROOT, environment(), PATIENCE)
    return json.loads(path.read_text()) if path.exists() else {}


def with_a_file(example: str, budget: int, log: list, folder: Path) -> tuple[str, str]:
    """Return the same for a run whose constants may leave for a file."""
    told = predict(log, budget, STEADY, limit=LIMIT, host=expected_host(FILE_BYTES, "cpu"))
    if told.status == "thrash":
        return "thrashes", ""
    host = "--host-budget", f"{FILE_BYTES}B:{folder}", "--heuristic", STEADY
    run = live(example, budget, "model", folder / "report.json", *host)
    if not run:
        return "failed", "the live run left no report"
    if told.status == "oom" and run["least_budget_bytes"] == told.least_budget_bytes:
        return "too small", ""
    copies = run["host"]["copies_out"], run["host"]["copies_in"]
    found = [run["evictions"], run["rematerializations"], run["peak_bytes"], *copies]
    expected = [told.evictions, told.rematerializations, told.peak_bytes, told.copies_out, told.copies_in]
    equal = found == expected and told.status == "ok"
    cell = f"{copies[0]:,}, {copies[1]:,}; {100 * (told.overhead - 1):.0f} %"
    if equal:
        return f"equal; {cell}", ""
    return f"differs; {cell}", f"{told.status} {expected}, live {found}"


def judged(example, budget, modelled, measured, path) -> tuple[str, str]:
    """Return a cell of the table, and what is wrong, or ""."""
    told = predict(modelled, budget, limit=LIMIT)
    if told.status == "thrash":
        return "thrashes", ""
    run = live(example, budget, "model", path)
    if not run:
        return "failed", "the live run left no report"
    if told.status == "oom" and run["least_budget_bytes"] == told.least_budget_bytes:
        return "too small", ""
    found = [run["evictions"], run["rematerializations"], run["peak_bytes"]]
    expected = [told.evictions, told.rematerializations, told.peak_bytes]
    equal = found == expected and told.status == "ok"
    wrong = "" if equal else f"{told.status} {expected}, live {found}"
    verdict = "equal" if equal else "differs"
    run, told = live(example, budget, "measured", path), predict(measured, budget, limit=LIMIT)
    if told.status != "ok" or run.get("exit_code") != 0:
        return f"{verdict}; measured: does not fit", wrong
    seconds = run["seconds"]
    again = 100 * seconds["rematerialization"] / seconds["operators"]
    guess = 100 * (told.overhead - 1)
    if abs(again - guess) > POINTS:
        wrong += f" recomputation of {guess:.0f} % predicted, {again:.0f} % measured"
    return f"{verdict}; {guess:.0f} %, {again:.0f} %", wrong.strip()
