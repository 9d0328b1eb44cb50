"""The simulator against the paper's: python -m tests.bench.simulator [--logs FOLDER] [--quick] [--only NAME]

FOLDER has the authors' logs and `expected.json`, what their simulator gave on them. Without it, the logs of
tests/logs and a synthetic one are simulated, and the comparison is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

from rich.console import Console

from dtrrun.simulator.log import Call, Constant, Instruction, Release
from dtrrun.simulator.replay import ReplayOutcome, simulate
from dtrrun.simulator.schedule import Schedule, read_schedule, schedule_of
from dtrrun.simulator.sweep import RATIOS, log_name
from tests.bench.optimum import optimum
from tests.bench.rules import rules
from tests.bench.runs import ROOT
from tests.bench.section import Section, replace_sections
from tests.bench.theorems import theorem_1, theorem_2
from tests.log_files import write_log

HEURISTICS = ("h_dtr", "h_dtr_eq", "h_dtr_local", "lru", "size", "msps")
WITHIN, CELLS = 0.01, 0.95
FASTER = 5
LONG, SECONDS = 100_000, 60

EQUAL = """\
The table covers the authors' logs with each heuristic and budget. Budgets are 1.0 to 0.1 of the log's peak,
as far as the authors' sweep goes, which stops at the first budget that fails. "Equal" means the same status
and, if that is ok, an overhead within 1%. At least 95% of the cells must be equal. "To the nanosecond"
ignores the one nanosecond with which the authors' clock starts. The last column breaks ties differently
(`--no-paper-ties`): among equal scores, it chooses the storage that entered the pool first, while the
authors' simulator chooses the one that was used or made last."""

SPEED = """\
The table shows processor times of the sweep with `h_dtr_eq`, in one process. "Theirs" is from
`expected.json`, measured on another machine. "Scan" is our replay on this machine, with every score computed
at each eviction. "Theirs", "scan" and "ours" are for the budgets of the authors' sweep. "Scores" are the
number of scores computed for each eviction that makes room. The synthetic log is a training step with 100,000
operators, at half of its peak. It should take less than a minute."""

ACCESSES = """\
The table shows storage accesses (App. D.3) at half of the peak: scores computed, and storages visited for the
neighbourhoods. "Theirs" is what the authors' simulator counts. Our scan uses our neighbourhoods, which are
updated only when a score is computed. Our search counts every storage that it looks at, whether or not its
score is computed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.simulator", description=__doc__)
    parser.add_argument("--logs", type=Path, help="the authors' logs and expected.json")
    parser.add_argument("--only", help="of: " + ", ".join(one.__name__ for one in MEASURES))
    parser.add_argument("--quick", action="store_true", help="the small logs only; writes nothing")
    args = parser.parse_args()
    expected = _expected(args.logs)
    console = Console()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for measure in MEASURES:
            if args.only and measure.__name__ not in args.only.split(","):
                continue
            section = measure(_logs(args.logs, Path(folder), args.quick), expected)
            if section is None:
                continue
            section.print(console)
            missed += len(section.missed)
            if not args.quick:
                text = section.markdown("make bench-simulator" + (" LOGS=…" if expected else ""))
                replace_sections(ROOT / "docs" / "measurements.md", {section.title: text})
    if not expected:
        console.print("The comparison with the authors' simulator was left out: LOGS=<folder> has its logs.")
    return 1 if missed else 0


def _expected(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return found


def _logs(folder: Path | None, made: Path, quick: bool) -> dict[str, Schedule]:
    paths = sorted((folder or ROOT / "tests" / "logs").glob("*.log*"))
    if not paths:
        paths = [made / "synthetic.log"]
        write_log(training(2_000), paths[0])
    if quick:
        paths = [path for path in paths if path.stat().st_size < 500_000]
    return {log_name(str(path)): read_schedule(path) for path in paths}


def equal(logs: dict[str, Schedule], expected: dict[str, Any]) -> Section | None:
    """Compare status and overhead in every cell that the authors' simulator has."""
    if not expected:
        return None
    headers = ["Log, heuristic", "Cells", "Equal", "To the nanosecond", "Equal with other ties"]
    section = Section("6. The simulator against the authors'", EQUAL, headers)
    all_cells, all_equal = 0, 0
    for name, schedule in logs.items():
        for heuristic in HEURISTICS:
            if not (theirs := expected.get(f"{name}/{heuristic}")):
                continue
            found = {
                ties: [_compare(schedule, heuristic, row, ties) for row in theirs["rows"]] for ties in (1, 0)
            }
            cells, same = len(theirs["rows"]), sum(one[0] for one in found[1])
            exact, other = sum(one[1] for one in found[1]), sum(one[0] for one in found[0])
            section.rows.append([f"{name}, {heuristic}", *map(str, (cells, same, exact, other))])
            all_cells, all_equal = all_cells + cells, all_equal + same
            for row, (is_same, _, what) in zip(theirs["rows"], found[1], strict=True):
                if not is_same:
                    section.text += f"\n\nDiffers: {name}, {heuristic} at {row['ratio']}: {what}."
    section.rows.append(["all", str(all_cells), str(all_equal), "", ""])
    for column in (3, 4):
        section.rows[-1][column] = str(sum(int(row[column]) for row in section.rows[:-1]))
    if all_equal < CELLS * all_cells:
        section.missed.append(f"only {all_equal} of {all_cells} cells are equal")
    return section


def _compare(schedule: Schedule, heuristic: str, row: dict[str, Any], ties: int) -> tuple[bool, bool, str]:
    found = simulate(schedule, int(schedule.peak_bytes * row["ratio"]), heuristic, paper_ties=bool(ties))
    what = f"{found.status} {found.overhead:.4f}, theirs {row['status']} {row['overhead']:.4f}"
    if found.status != row["status"]:
        return False, False, what
    if found.status != "ok":
        return True, True, what
    exact = found.time + 1 == round(row["overhead"] * schedule.cost)
    return abs(found.overhead / row["overhead"] - 1) <= WITHIN, exact, what


def speed(logs: dict[str, Schedule], expected: dict[str, Any]) -> Section:
    """Measure the times of the sweep with h_dtr_eq, and of one long log."""
    headers = ["Log", "Theirs", "Scan", "Ours", "All ten budgets", "Scores, scan", "Scores, ours"]
    section = Section("7. The simulator's speed", SPEED, headers)
    sums = [0.0] * 4
    for name, schedule in logs.items():
        rows = expected.get(f"{name}/h_dtr_eq", {}).get("rows", [])
        ratios = [row["ratio"] for row in rows] or RATIOS
        theirs = sum(row["seconds"] for row in rows)
        ours = {ratio: timed(schedule, ratio) for ratio in RATIOS}
        scan = {ratio: timed(schedule, ratio, scan=True) for ratio in ratios}
        times = [
            theirs,
            sum(one.seconds for one in scan.values()),
            sum(ours[ratio].seconds for ratio in ratios),
            sum(one.seconds for one in ours.values()),
        ]
        sums = [a + b for a, b in zip(sums, times, strict=True)]
        scores = [
            sum(one.evaluations for one in some) / max(sum(one.chosen for one in some), 1)
            for some in (scan.values(), [ours[ratio] for ratio in ratios])
        ]
        section.rows.append([name, *map(_seconds, times), *(f"{one:.1f}" for one in scores)])
    section.rows.append(["all", *map(_seconds, sums), "", ""])
    section.rows.append(
        ["times ours", f"{sums[0] / sums[2]:.1f}", f"{sums[1] / sums[2]:.1f}", "1", "", "", ""]
    )
    if expected and sums[0] < FASTER * sums[2]:
        section.missed.append(
            f"only {sums[0] / sums[2]:.1f} times as fast as theirs, where {FASTER} was meant"
        )
    long = schedule_of(training(LONG), "synthetic")
    outcome = timed(long, 0.5)
    scores_per = outcome.evaluations / outcome.chosen
    section.rows.append(
        [f"synthetic, {LONG:,}", "", "", _seconds(outcome.seconds), "", "", f"{scores_per:.1f}"]
    )
    if outcome.status != "ok" or outcome.seconds > SECONDS:
        section.missed.append(f"{LONG:,} operators: {outcome.status} after {outcome.seconds:.0f} s")
    return section


def accesses(logs: dict[str, Schedule], expected: dict[str, Any]) -> Section:
    """Count what the search saves, by the paper's measure."""
    section = Section("8. Storage accesses", ACCESSES, ["Log, heuristic", "Theirs", "Scan", "Ours"])
    for name, schedule in logs.items():
        for heuristic in ("h_dtr", "h_dtr_eq", "h_dtr_local"):
            rows = expected.get(f"{name}/{heuristic}", {}).get("rows", [])
            theirs = next((f"{row['accesses']:,}" for row in rows if row["ratio"] == 0.5), "")
            found = [
                simulate(schedule, schedule.peak_bytes // 2, heuristic, scan=scan, count=True)
                for scan in (True, False)
            ]
            section.rows.append([f"{name}, {heuristic}", theirs, *(f"{one.accesses:,}" for one in found)])
    return section


def timed(schedule: Schedule, ratio: float, scan: bool = False) -> ReplayOutcome:
    """Simulate with CPU time as its seconds, since other programs use the machine too."""
    started = process_time()
    outcome = simulate(schedule, int(schedule.peak_bytes * ratio), "h_dtr_eq", scan=scan)
    return replace(outcome, seconds=process_time() - started)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds else ""


def training(operators: int, seed: int = 0) -> list[Instruction]:
    """Return a step, forward and backward, of a deep network with skip connections and random costs."""
    r = random.Random(seed)
    layers = operators // 2
    log: list[Instruction] = [Constant("x0", 10**6)]
    for i in range(1, layers + 1):
        inputs = (f"x{i - 1}", f"x{i - 3}") if i % 3 == 0 else (f"x{i - 1}",)
        log.append(
            Call("layer", inputs, (f"x{i}",), (r.randint(10**3, 10**6),), (-1,), r.randint(10**3, 10**6))
        )
    log.append(Call("loss", (f"x{layers}",), (f"g{layers}",), (8,), (-1,), 10**3))
    for i in range(layers, 0, -1):
        inputs = (f"g{i}", f"x{i}", f"x{i - 1}")
        log.append(Call("backward", inputs, (f"g{i - 1}",), (10**4,), (-1,), r.randint(10**3, 2 * 10**6)))
        log += [Release(f"g{i}"), Release(f"x{i}")]
    return log


MEASURES = (equal, speed, accesses, rules, theorem_1, theorem_2, optimum)

if __name__ == "__main__":
    sys.exit(main())
