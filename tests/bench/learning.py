"""Rules in a run: the paper's, one that knows the step before, and what a run learns by itself."""

import json
import sys
import tempfile
from pathlib import Path

from dtrrun.native import build
from tests.bench.runs import PATIENCE, ROOT, environment, finished
from tests.bench.section import Section
from tests.logs.make import SMALL

SHARES = (70, 50, 40, 30, 20)
RULES = ("h_dtr_eq", "h_next", "auto")
STEPS, LEARNING = 8, 60
"""Of a run that is measured, and of one that learns for it."""

TEXT = f"""\
The table shows the recomputation in the last of {STEPS} steps as a share of the program's own operators,
inside a share of the peak, with {", ".join(RULES)}, in this order. With auto, it is a run that begins with
what a run of {LEARNING} steps has left in the cache. The examples have the sizes of tests/logs. "–" means
that the budget is too small, or that a step takes more than five times as long as its own work. For the GAN,
the figures are those of the network that steps last."""


def measure(quick: bool) -> Section:
    shares = SHARES[2:3] if quick else SHARES
    section = Section("14. Rules in a run", TEXT, ["Example", *map("{} %".format, shares)])
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "dtrrun")
        cache.mkdir()
        if build.cache_folder().exists():
            (cache / "native").symlink_to(build.cache_folder())
        for example in SMALL:
            one = Runs(example, Path(folder))
            row = [example]
            for percent in shares:
                found = [one.recomputed(one.peak * percent // 100, rule) for rule in RULES]
                row.append(", ".join("–" if share is None else f"{100 * share:.0f} %" for share in found))
            section.rows.append(row)
            print(*row, sep=" | ", file=sys.stderr, flush=True)  # it takes an hour
    return section


class Runs:
    """Of one example, with a cache of their own."""

    def __init__(self, example: str, folder: Path) -> None:
        script = str(ROOT / "docs" / "examples" / f"{example}.py")
        self._report = folder / "report.json"
        self._environment = environment() | {"XDG_CACHE_HOME": str(folder)}
        self._target = [sys.executable, script, *SMALL[example], "--steps", str(LEARNING)]
        self._run("--max-steps", "2")
        self.peak = json.loads(self._report.read_text())["peak_bytes"]

    def recomputed(self, budget: int, rule: str) -> float | None:
        """Share of the last step's own operators, None if the run did not get there."""
        options = ["--budget", f"{budget}B", "--heuristic", rule]
        limits = ["--max-slowdown", "5", "--on-thrash", "stop"]
        if rule == "auto":
            self._run(*options, *limits)
        status = self._run(*options, *limits, "--max-steps", str(STEPS))
        if status or not self._report.exists():
            return None
        (process,) = json.loads(self._report.read_text())["processes"]
        seconds = process["last_step"]["seconds"]
        return seconds["rematerialization"] / seconds["operators"]

    def _run(self, *options: str) -> int:
        self._report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "dtrrun", "--quiet", "--json", str(self._report), *options]
        status, _, _ = finished([*command, *self._target], ROOT, self._environment, PATIENCE)
        return status
