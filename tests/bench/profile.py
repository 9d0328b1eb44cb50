"""`dtrrun profile` on the examples: its findings, its time, and the errors of its predictions."""

import json
import sys
import tempfile
from pathlib import Path

from tests.bench.runs import ROOT, TINY, environment, finished
from tests.bench.section import Section

PATIENCE = 3600
MOST_RUNS = 20
POINTS = 10
NEAR = 0.1
QUICK = ("vae", "transformer", "resnet")

TEXT = """\
`dtrrun profile` runs on each example with its default arguments. The columns are:

- the plain peak;
- the minimum budget as a share of the plain peak, and how the run with 5% less failed;
- the recommended budget as a share of the plain peak, its heuristic, and the slowdown;
- the time of the whole command, in plain runs of as many steps;
- the largest difference between predicted and measured slowdown, in percentage points, and in brackets the
  number of checked budgets;
- the evictions of the first and the last step with the profile, and in brackets those of the first step
  without its costs;
- whether two runs with the profile made the same decisions."""

HEADERS = [
    "Example", "Peak", "Minimum", "5 % less", "Recommended", "Slowdown", "Time", "Off by", "First, last step",
    "Alike",
]  # fmt: skip


def measure(quick: bool) -> Section:
    section = Section("16. Profiles", TEXT, HEADERS)
    for example in QUICK if quick else TINY:
        with tempfile.TemporaryDirectory() as folder:
            row, wrong = _measured(example, Path(folder))
        section.rows.append([example, *row])
        section.missed += [f"{example}: {one}" for one in wrong]
    return section


def _measured(example: str, folder: Path) -> tuple[list[str], list[str]]:
    script = str(ROOT / "docs" / "examples" / f"{example}.py")
    profile, file = str(folder / "found.yaml"), folder / "found.json"
    options = ["profile", "--quiet", "-o", profile, "--json", str(file)]
    status, stderr, _ = finished(_dtrrun(*options, script), ROOT, environment(), PATIENCE)
    if status:
        return [""] * (len(HEADERS) - 1), [stderr[-1000:]]
    found = json.loads(file.read_text())
    peak, least, best = (found[f"{name}_bytes"] for name in ("plain_peak", "minimum", "recommended"))
    measured = {row["budget_bytes"]: row for row in found["points"] if row["measured"]}
    under = [row for budget, row in measured.items() if least * 95 // 100 <= budget < least]
    below = max(under, key=lambda row: row["budget_bytes"])["measured"]["status"] if under else "not run"
    runs = found["seconds"] / found["plain_run_seconds"]
    off = [
        100 * abs(row["predicted"]["slowdown"] - row["measured"]["slowdown"])
        for row in measured.values()
        if row["measured"]["status"] == "ok" and row["predicted"]["slowdown"]
    ]
    knowing = [_steps(folder, script, ["--profile", profile], found["steps"]) for _ in range(2)]
    options = ["--budget", f"{best}B", "--heuristic", found["recommended_heuristic"]]
    ignorant = _steps(folder, script, options, found["steps"])
    (first, last), (before, _) = (_ends(steps) for steps in (knowing[0], ignorant))
    alike = knowing[0] == knowing[1]
    wrong = []
    if not found["minimum_certified"] or below in ("ok", "not run"):
        wrong.append(f"at most 5 % below the minimum: {below}")
    if runs > MOST_RUNS:
        wrong.append(f"took {runs:.0f} plain runs")
    if max(off, default=0) > POINTS:
        wrong.append(f"a prediction was {max(off):.0f} percentage points off")
    if abs(first - last) > NEAR * last:
        wrong.append(f"the first step has {first} evictions, the last {last}")
    if not alike:
        wrong.append("two runs with its profile decided differently")
    slowdown = measured[best]["measured"]["slowdown"]
    return [
        f"{peak / 1e6:.0f} MB",
        f"{100 * least / peak:.0f} %",
        below,
        f"{100 * best / peak:.0f} %, {found['recommended_heuristic']}",
        f"{slowdown:.2f}",
        f"{runs:.1f}",
        f"{max(off, default=0):.1f} ({len(off)})",
        f"{first} ({before}), {last}",
        "yes" if alike else "no",
    ], wrong


def _steps(folder: Path, script: str, options: list[str], count: int) -> list[tuple[int, int]]:
    """Return the evictions and rematerializations of each step."""
    code = (
        "import atexit, json, sys, runpy, torch\n"
        "from dtrrun import runtime\n"
        "name, *sys.argv = sys.argv[1:]\n"
        "def told():\n"
        "    steps = runtime._active.steps.latest\n"
        "    rows = [(step['evictions'], step['rematerializations']) for step in steps]\n"
        "    json.dump(rows, open(name, 'w'))\n"
        "atexit.register(told)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    file = folder / "steps.json"
    file.unlink(missing_ok=True)
    words = [*options, "--quiet", "--max-steps", str(count), sys.executable, "-c", code, str(file), script]
    finished(_dtrrun(*words), ROOT, environment(), PATIENCE)
    return [tuple(row) for row in json.loads(file.read_text())] if file.exists() else []


def _ends(steps: list[tuple[int, int]]) -> tuple[int, int]:
    return (steps[0][0], steps[-1][0]) if steps else (0, 0)


def _dtrrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "dtrrun", *words]
