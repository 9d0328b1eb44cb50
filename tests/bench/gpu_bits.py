"""Whether programs of others keep to a budget on a GPU, with the same bits.

`python -m tests.bench.gpu_bits [NAME…] [--share S…]`

Each program of scripts/on_a_gpu.py runs on tests/hollow with --races, in processes of its own: plainly, and
inside shares of its peak, or inside the budget that dtrrun's error advises. Needs the interpreter of a
PyTorch with CUDA 13 and, on PYTHONPATH, the libraries.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dtrrun.profiling.room import budget_for
from tests.bench.runs import environment
from tests.bench.scripts.on_a_gpu import PROGRAMS
from tests.bench.section import row

SCRIPT = Path(__file__).parent / "scripts" / "on_a_gpu.py"
HEADERS = ("Program", "Peak", "Share", "Bits", "Races", "Driver", "Evictions", "Replays")
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "HF_HUB_OFFLINE": "1"}
PATIENCE = 500
"""Seconds."""
TRIES = 4


def run(name: str, budget: int | None) -> dict[str, Any]:
    """Return what a run has printed, what dtrrun reports of it, and whether there was a race."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        ours = ["-m", "dtrrun", "--quiet", "--device", "cuda", "--host-budget", "none", "--json", str(report)]
        inside = [] if budget is None else [*ours, "--budget", f"{budget}B", sys.executable]
        done = subprocess.run(
            [sys.executable, "-m", "tests.hollow", "--races", sys.executable, *inside, str(SCRIPT), name],
            env=environment() | SETTINGS,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    found["races"] = "RACE: " in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"digest"')]
    if lines:
        return found | json.loads(lines[-1])
    if not found.get("error"):
        raise SystemExit(f"{name}, {budget}: {done.stderr[-2000:]}")
    return found


def inside(name: str, plain: dict[str, Any], share: float) -> list[str]:
    peak, beside = plain["peak"], plain["beside"]
    budget = budget_for(int(peak * share), beside)
    for _ in range(TRIES):
        found = run(name, budget)
        if "digest" in found:
            break
        budget = found["error"]["least_budget_bytes"] * 51 // 50
    else:
        return ["", "error", "", "", "", ""]
    over = found["driver"] - budget
    return [
        f"{(budget - budget_for(0, beside)) / peak:.0%}",
        "equal" if found["digest"] == plain["digest"] else "OTHER",
        "SOME" if found["races"] or plain["races"] else "none",
        f"{found['driver'] / budget:.0%}" if over <= 0 else f"OVER by {over}",
        f"{found['evictions']:,}",
        f"{found['rematerializations']:,}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_bits", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is given")
    parser.add_argument("--share", type=float, nargs="*", default=[0.7, 0.5])
    args = parser.parse_args()
    print(row(HEADERS))
    print("|---" + "|---:" * (len(HEADERS) - 1) + "|")
    for name in args.names or PROGRAMS:
        plain = run(name, None)
        for share in args.share:
            cells = [name, f"{plain['peak'] / 1e6:.0f} MB", *inside(name, plain, share)]
            print(row(cells), flush=True)


if __name__ == "__main__":
    main()
