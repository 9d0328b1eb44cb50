"""Runs a case as a user would: its program plainly, and the same command with `dtrrun` before it."""

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.runs import environment, finished
from tests.ecosystem.cases import Case

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
PATIENCE = 120
"""Seconds; a run takes about 10."""


@dataclass(frozen=True)
class Run:
    """A run's outcome. `results`: what the program wrote, by rank; `report` is empty if it ran plainly."""

    exit_code: int
    stderr: str
    results: dict[str, dict] = field(default_factory=dict)
    report: dict = field(default_factory=dict)

    @property
    def infeasible(self) -> bool:
        """Return whether it ended with the explicit error that the budget is too small."""
        return self.exit_code != 0 and bool(self.report.get("error"))

    @property
    def step_seconds(self) -> float:
        return max(result["step_seconds"] for result in self.results.values())


def plain(case: Case) -> Run:
    """Run without dtrrun."""
    return _run(case, None)


def inside(case: Case, budget: int | None, *, verify: bool = False) -> Run:
    """Run under dtrrun; `budget` in bytes, None to count only."""
    options = ["--budget", f"{budget}B"] if budget is not None else []
    return _run(case, [*options, *(["--verify"] if verify else [])])


def difference(a: Run, b: Run) -> str:
    """Return the first difference between two successful runs; "" if they are equal bit for bit."""
    if a.results.keys() != b.results.keys():
        return "other processes"
    for rank, result in a.results.items():
        other = b.results[rank]["bits"]
        if result["bits"].keys() != other.keys():
            return f"rank {rank}: other names"
        for name, sha in result["bits"].items():
            if other[name] != sha:
                return f"rank {rank}: {name}"
    return ""


def _run(case: Case, options: list[str] | None) -> Run:
    """Run a case. options: dtrrun's; None: without dtrrun."""
    under = options is not None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        ours: list[str] = [sys.executable, "-m", "dtrrun", "--quiet", "--json", str(report), *(options or [])]
        launcher = list(case.launcher) or ([] if under else [sys.executable])
        results = Path(folder, "results")
        results.mkdir()
        command = [*(ours if under else []), *launcher, str(PROGRAMS / case.program), *case.arguments]
        settings = _environment() | {"RESULTS": str(results)}
        status, stderr, done = finished(command, folder, settings, PATIENCE)
        if not done:
            return Run(status or 1, stderr)
        written = {path.stem: json.loads(path.read_text()) for path in sorted(results.iterdir())}
        found = json.loads(report.read_text()) if report.exists() else {}
        return Run(status, stderr, written, found)


def _environment() -> dict[str, str]:
    """Return our environment without dtrrun's options, with one thread, no network and `tests.bench`."""
    return environment() | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
