"""Runs an example plainly or inside a budget, each in a separate process."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from dtrrun.core.heuristics import STEADY

ROOT = Path(__file__).resolve().parents[2]
CAPTURE = Path(__file__).with_name("capture.py")

PATIENCE = 400
"""Seconds; plain runs take 10 to 60."""

TINY = {
    "resnet": ["--batch-size", "2"],
    "densenet": ["--batch-size", "2"],
    "unet": ["--batch-size", "2", "--size", "32"],
    "transformer": ["--batch-size", "1"],
    "lstm": ["--batch-size", "2"],
    "treelstm": ["--batch-size", "1"],
    "unrolled_gan": ["--batch-size", "2"],
    "vae": ["--batch-size", "1"],
    "amp": ["--batch-size", "1"],
}
"""The examples, and arguments with which memory holds little but weights and the program."""


@dataclass(frozen=True)
class Run:
    """A run's outcome. `capture` is empty if the script failed, `report` if it ran plainly."""

    exit_code: int
    stderr: str
    capture: dict = field(default_factory=dict)
    report: dict = field(default_factory=dict)

    @property
    def infeasible(self) -> bool:
        """Return whether it ended with the explicit error that the budget is too small."""
        return self.exit_code == 1 and "BudgetError: " in self.stderr

    @property
    def step_seconds(self) -> float:
        """Return the mean over the steps after the second, when sizes are known and caches are warm."""
        steps = self.capture["step_seconds"][2:]
        return sum(steps) / len(steps)


def plain(example: str, *arguments: str, **variables: str) -> Run:
    """Run without dtrrun; `variables` are added to the environment."""
    return _run([], example, arguments, variables)


def inside(budget: int | None, example: str, *arguments: str, **variables: str) -> Run:
    """Run under dtrrun; `budget` in bytes, None to count only."""
    options = (
        [] if budget is None else ["--budget", f"{budget}B", "--heuristic", STEADY]
    )  # no search in the background
    return _run([sys.executable, "-m", "dtrrun", "--quiet", *options], example, arguments, variables)


def share(percent: int, peak: int) -> int:
    return peak * percent // 100


def difference(a: Run, b: Run) -> str:
    """Return the first difference between two successful runs; "" if they are equal bit for bit."""
    for part in ("state", "rng"):
        if a.capture[part].keys() != b.capture[part].keys():
            return f"{part}: other names"
        for name, sha in a.capture[part].items():
            if b.capture[part][name] != sha:
                return f"{part}: {name}"
    for line, other in zip(a.capture["stdout"], b.capture["stdout"], strict=False):
        if line != other:
            return f"output: {line!r}, {other!r}"
    return "" if a.capture["stdout"] == b.capture["stdout"] else "output: other length"


plain_once = functools.cache(plain)
inside_once = functools.cache(inside)
"""For figures that are the same in every run: bits and bytes, not times."""


def _run(prefix: list[str], example: str, arguments: tuple[str, ...], variables: dict[str, str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        capture, report = Path(folder, "capture.json"), Path(folder, "report.json")
        if prefix:
            prefix = [*prefix, "--json", str(report)]
        script = ROOT / "docs" / "examples" / f"{example}.py"
        if not script.exists():
            # In a separate folder: a script's folder is importable, and `profile` is also Python's module.
            script = Path(__file__).parent / "scripts" / f"{example}.py"
        command = [*prefix, sys.executable, str(CAPTURE), str(capture), str(script), *arguments]
        status, stderr, done = finished(command, ROOT, environment() | variables, PATIENCE)
        return Run(status, stderr, _json(capture), _json(report)) if done else Run(status, stderr)


def finished(
    command: list[str], folder: str | Path, variables: dict[str, str], patience: float
) -> tuple[int, str, bool]:
    """Return a command's exit status and standard error, and whether it ended within `patience` seconds."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, stderr = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.terminate()  # dtrrun passes the signal on
        _, stderr = process.communicate()
        return process.returncode, f"{stderr}\nnot done after {patience} s", False
    return process.returncode, stderr, True


def environment() -> dict[str, str]:
    """Return our environment without dtrrun's options, for programs on the CPU, even if there is a GPU.

    On one thread: two OpenMP threads on busy cores make times noisy.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DTRRUN_")}
    return kept | {"OMP_NUM_THREADS": "1", "DTRRUN_DEVICE": "cpu"}


def _json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}
