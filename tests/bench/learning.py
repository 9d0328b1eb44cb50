"""Rules in a run: the paper's, one that knows the previous step, and what a run learns by itself."""

import json
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from dtrrun.extensions import building
from tests.bench.runs import PATIENCE, ROOT, environment, finished
from tests.bench.section import Section
from tests.logs.make import SMALL

SHARES = (70, 50, 40, 30, 20)
LOW = SHARES[2:]
RULES = ("h_dtr_eq", "h_next", "auto")
STEPS, LEARNING = 8, 60
"""Steps of a measured run, and of one that learns for it."""
OTHER_STEPS = {"unrolled_gan": 7}
"""Its eighth step is the discriminator's alone, which evicts almost nothing."""

TEXT = f"""\
The table shows the recomputation in the last of {STEPS} steps as a share of the program's own operators,
inside a share of the peak, with {", ".join(RULES)}, in this order. With auto, it is a run that begins with
what a run of {LEARNING} steps has left in the cache; in parentheses is what the search predicted, if it found
something. The examples have the sizes of tests/logs. "–" means that the budget is too small, or that a step
takes more than ten times as long as its own work. For the GAN, it is the last step of its generator."""

GAINED = """
At {shares}, {cells} cells run with {baseline} and with auto. In the geometric mean, the last step takes
{factor:.2f} times as long with {baseline} as with auto, relative to its own operators. {more} cells run
only with auto, and {fewer} only with {baseline}."""


def measure(quick: bool) -> Section:
    shares = SHARES[2:3] if quick else SHARES
    section = Section("14. Heuristics in a run", TEXT, ["Example", *map("{} %".format, shares)])
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "dtrrun")
        cache.mkdir()
        if building.cache_folder().exists():
            (cache / "native").symlink_to(building.cache_folder())
        low: list[dict[str, Any]] = []  # the cells with little memory
        for example in SMALL:
            one = Runs(example, Path(folder))
            row = [example]
            for percent in shares:
                found = {rule: one.last_step(one.peak * percent // 100, rule) for rule in RULES}
                if percent in LOW:
                    low.append(found)
                row.append(", ".join(map(_shown, found.values())))
            section.rows.append(row)
            print(*row, sep=" | ", file=sys.stderr, flush=True)  # it takes an hour
    section.text += "\n" + _gained(low)
    return section


def _shown(step: dict[str, Any] | None) -> str:
    if step is None:
        return "–"
    share = f"{100 * _share(step):.0f} %"
    return share if step["predicted"] is None else f"{share} ({100 * (step['predicted'] - 1):.0f})"


def _share(step: dict[str, Any]) -> float:
    return float(step["seconds"]["rematerialization"] / step["seconds"]["operators"])


def _gained(cells: list[dict[str, Any]]) -> str:
    """Compare the whole step's time, including choices and bookkeeping."""
    baseline = RULES[0]
    both = [cell for cell in cells if cell[baseline] and cell["auto"]]
    times = [[_time(cell[rule]) for cell in both] for rule in (baseline, "auto")]
    return GAINED.format(
        shares=", ".join(f"{share} %" for share in LOW),
        cells=len(both),
        baseline=baseline,
        factor=geometric_mean(times[0]) / geometric_mean(times[1]) if both else float("nan"),
        more=sum(1 for cell in cells if cell["auto"] and not cell[baseline]),
        fewer=sum(1 for cell in cells if cell[baseline] and not cell["auto"]),
    )


def _time(step: dict[str, Any]) -> float:
    return float(step["seconds"]["wall"] / step["seconds"]["operators"])


class Runs:
    """Runs of one example, with their own cache."""

    def __init__(self, example: str, folder: Path) -> None:
        script = str(ROOT / "docs" / "examples" / f"{example}.py")
        self._report = folder / "report.json"
        self._steps = OTHER_STEPS.get(example, STEPS)
        self._environment = environment() | {"XDG_CACHE_HOME": str(folder)}
        self._target = [sys.executable, script, *SMALL[example], "--steps", str(LEARNING)]
        self._run("--max-steps", "2")
        self.peak = json.loads(self._report.read_text())["peak_bytes"]

    def last_step(self, budget: int, rule: str) -> dict[str, Any] | None:
        """Return it as in the report, with the search's prediction; None if the run did not get there."""
        options = ["--budget", f"{budget}B", "--heuristic", rule]
        limits = ["--max-slowdown", "10", "--on-thrash", "stop"]
        predicted = None
        if rule == "auto":
            self._run(*options)
            learned = self._process().get("rule") or {}
            predicted = learned.get("predicted") if learned.get("source") == "searched" else None
        if self._run(*options, *limits, "--max-steps", str(self._steps)):
            return None
        return {**self._process()["last_step"], "predicted": predicted}

    def _process(self) -> dict[str, Any]:
        """Return the process in the report, or {} without a report."""
        if not self._report.exists():
            return {}
        (process,) = json.loads(self._report.read_text())["processes"]
        return dict(process)

    def _run(self, *options: str) -> int:
        self._report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "dtrrun", "--quiet", "--json", str(self._report), *options]
        status, _, _ = finished([*command, *self._target], ROOT, self._environment, PATIENCE)
        return status
