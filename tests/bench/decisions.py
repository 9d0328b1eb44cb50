"""Whether what is evicted and recomputed depends on the way that operators take, in each example.

`python -m tests.bench.decisions [EXAMPLE…] [--steps N] [ARGS…]`, from the project's folder. Each example runs
inside shares of its peak in two ways, which must decide alike: as usual, and with all operators on the
longest way. Costs are those of `--cost model`, since measured ones differ from run to run.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.bench.runs import (
    CAPTURE,
    PATIENCE,
    ROOT,
    TINY,
    Run,
    difference,
    environment,
    finished,
    plain,
    share,
)
from tests.bench.section import row

SHARES = (70, 50, 40)
CAREFULLY = Path(__file__).with_name("carefully.py")

WAYS = {
    "native": [],
    "careful": [str(CAREFULLY)],
}
"""For each way, the words before the script."""

SHOWN = ("evictions", "rematerializations", "peak_bytes")
COMPARED = (*SHOWN, "evicted_bytes", "rematerialized_bytes", "over_budget", "error")


def run(way: str, budget: int | None, example: str, *arguments: str, heuristic: str = "h_dtr_eq") -> Run:
    options = ["--heuristic", heuristic]
    if budget is not None:
        options = [*options, "--budget", f"{budget}B"]
    with tempfile.TemporaryDirectory() as folder:
        capture, report = Path(folder, "capture.json"), Path(folder, "report.json")
        command = [
            sys.executable,
            "-m",
            "dtrrun",
            "--quiet",
            "--cost",
            "model",
            "--json",
            str(report),
            *options,
        ]
        script = ROOT / "docs" / "examples" / f"{example}.py"
        command += [sys.executable, *WAYS[way], str(CAPTURE), str(capture), str(script), *arguments]
        status, stderr, _ = finished(command, ROOT, environment(), PATIENCE)
        found = [json.loads(file.read_text()) if file.exists() else {} for file in (capture, report)]
    result = Run(status, stderr, *found)
    if not result.report or (status and not result.infeasible):
        raise RuntimeError(f"{example}, {way}, {budget}: exit status {status}: {stderr[-1000:]}")
    return result


def shown(one: Run) -> list[str]:
    if one.infeasible:
        return [f"needs {one.report['least_budget_bytes']:,}", "", ""]
    return [f"{one.report[name]:,}" for name in SHOWN]


def compared(ours: Run, theirs: Run) -> tuple[str, bool, bool]:
    """Return a cell of the table, whether decisions are equal, and whether bits are."""
    decisions = all(ours.report[name] == theirs.report[name] for name in COMPARED)
    if (ours.infeasible or theirs.infeasible) or not (other := difference(ours, theirs)):
        return ("equal" if decisions else " ".join(shown(theirs))), decisions, True
    return f"other bits: {other}", decisions, False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.decisions", description=__doc__)
    parser.add_argument(
        "examples", nargs="*", metavar="EXAMPLE", help=f"of {', '.join(TINY)}; all if none is given"
    )
    parser.add_argument("--steps", default="3")
    args, more = parser.parse_known_args()  # the others are for the examples
    if unknown := set(args.examples) - set(TINY):
        parser.error(f"no example is called {', '.join(sorted(unknown))}")
    headers = ["Example", "Share", "Evictions", "Rematerializations", "Peak", "With care"]
    print(row(headers), row(["---"] * len(headers)), sep="\n", flush=True)
    wrong = 0
    for example in args.examples or TINY:
        arguments = ["--steps", args.steps, *more]
        expected = plain(example, *arguments)
        peak = run("native", None, example, *arguments).report["peak_bytes"]
        for percent in SHARES:
            native, careful = (run(way, share(percent, peak), example, *arguments) for way in WAYS)
            with_care, alike, same = compared(native, careful)
            right = native.infeasible or not difference(expected, native)
            cells = [example, f"{percent} %", *shown(native), with_care]
            print(row(cells), "" if right else "other bits than a plain run", flush=True)
            wrong += not (alike and same and right)
    print(f"\n{wrong} differ that should not")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
