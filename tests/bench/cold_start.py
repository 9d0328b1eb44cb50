"""What `--heuristic auto` recomputes in the first steps of a run, against the paper's rule.

    python -m tests.bench.cold_start [EXAMPLE…] [--rounds 5] [--budgets 40,30,20] [-- ARGUMENTS]

Unlike `python -m tests.bench cold_start`, this prints each cell and writes nothing. ARGUMENTS replace those
of the examples.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

from dtrrun.core.heuristics import AUTO, INITIAL
from dtrrun.extensions import building
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import Instruction, read_log
from tests.bench.replays import beginning
from tests.bench.runs import PATIENCE, ROOT, environment, finished
from tests.bench.section import Section
from tests.bench.start import Beginning
from tests.logs.make import SMALL

SHARES = (40, 30, 20)
STEPS, ROUNDS = 12, 5
RULES = (INITIAL, AUTO)
LIMIT = 10
"""What takes more than this multiple of its own work counts as not running."""
AT_MOST, MEAN = 1.05, 0.9
"""What auto recomputes, relative to the paper's rule: in each cell, and the geometric mean."""

TEXT = f"""\
The table shows the recomputation in the first {STEPS} steps as a share of the program's own operators, inside
a share of the peak, with {INITIAL}, with auto, and the quotient of both. No earlier run is remembered. The
examples have the sizes of tests/logs. "In the simulator" is a replay of a log of these steps with modelled
costs, in which decisions do not depend on the machine, and nothing is searched. "In a run" costs are
measured, and the figures are the medians of {ROUNDS} runs of each, which take turns. "–" means that the
budget is too small, or that the steps take more than {LIMIT} times as long as their own work. Budgets with
which neither runs are left out."""


class Cell(NamedTuple):
    """Shares of recomputation with `INITIAL` and with `AUTO`; None: it did not run."""

    paper: float | None
    auto: float | None

    @property
    def ratio(self) -> float | None:
        return self.auto / self.paper if self.paper and self.auto is not None else None

    def words(self) -> list[str]:
        shares = ["–" if share is None else f"{100 * share:.1f} %" for share in self]
        return [*shares, "" if self.ratio is None else f"{self.ratio:.2f}"]


def measure(quick: bool) -> Section:
    kinds = ("in the simulator", "in a run")
    section = Section(
        "33. The first steps of a run",
        TEXT,
        ["Example, budget", *(f"{rule} {kind}" for kind in kinds for rule in (INITIAL, "auto", "auto /"))],
    )
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for name, *cells in measured(SMALL, SHARES[:1] if quick else SHARES, 1 if quick else ROUNDS):
        section.rows.append([name, *cells[0].words(), *cells[1].words()])
        for kind, cell in zip(kinds, cells, strict=True):
            if cell.paper is not None and (cell.ratio is None or cell.ratio > AT_MOST):
                section.missed.append(
                    f"{name}, {kind}: {cell.words()[-1] or 'does not run'}, should be {AT_MOST}"
                )
            if cell.ratio is not None:
                found[kind].append(cell.ratio)
    for kind, ratios in found.items():
        mean = geometric_mean(ratios)
        section.text += f"\n\nThe geometric mean {kind} is {mean:.3f}, of {len(ratios)} cells."
        if mean > MEAN:
            section.missed.append(f"{kind}, the geometric mean is {mean:.3f}, should be {MEAN}")
    return section


def measured(
    examples: dict[str, list[str]], shares: Sequence[int], rounds: int
) -> Iterator[tuple[str, Cell, Cell]]:
    """Yield each example and budget, in the simulator and in a run."""
    for example, arguments in examples.items():
        with tempfile.TemporaryDirectory() as folder:
            one = Starts(example, arguments, Path(folder))
            for percent in shares:
                simulated, live = one.simulated(percent), one.live(percent, rounds)
                if any(share is not None for share in (*simulated, *live)):
                    yield f"{example}, {percent} %", simulated, live


class Starts:
    """The first steps of an example."""

    def __init__(self, example: str, arguments: Sequence[str], folder: Path) -> None:
        cache = folder / "dtrrun"
        cache.mkdir()
        if building.cache_folder().exists():
            (cache / "native").symlink_to(building.cache_folder())
        self._environment = environment() | {"XDG_CACHE_HOME": str(folder)}
        script = str(ROOT / "docs" / "examples" / f"{example}.py")
        self._target = [sys.executable, script, *arguments, "--steps", str(STEPS + 1)]
        self._report, log = folder / "report.json", folder / "steps.log.gz"
        self._run("--max-steps", "2", "--json", str(self._report))
        self._peak = json.loads(self._report.read_text())["peak_bytes"]
        self._run("--cost", "model", "--step", f"1-{STEPS}", "-o", str(log), verb="record")
        self._log: list[Instruction] = read_log(log)

    def simulated(self, percent: int) -> Cell:
        return Cell(*(self._predicted(self._peak * percent // 100, rule) for rule in RULES))

    def _predicted(self, budget: int, rule: str) -> float | None:
        with beginning(Beginning().watch if rule == AUTO else lambda _: None):
            outcome = predict(self._log, budget, INITIAL, limit=LIMIT)
        return outcome.overhead - 1 if outcome.status == "ok" else None

    def live(self, percent: int, rounds: int) -> Cell:
        """Return the medians over runs that take turns. If most do not run, the median doesn't either."""
        never = float("inf")
        runs: dict[str, list[float]] = {rule: [] for rule in RULES}
        for _ in range(rounds):
            for rule, shares in runs.items():
                share = self._share(self._peak * percent // 100, rule)
                shares.append(never if share is None else share)
            if all(shares[0] == never for shares in runs.values()):
                break
        print(f"{percent} %", runs, file=sys.stderr, flush=True)
        middle = (median(shares) for shares in runs.values())
        return Cell(*(None if share == never else share for share in middle))

    def _share(self, budget: int, rule: str) -> float | None:
        self._report.unlink(missing_ok=True)
        inside = ["--budget", f"{budget}B", "--heuristic", rule, "--no-remember"]
        limits = ["--max-steps", str(STEPS), "--max-slowdown", str(LIMIT), "--on-thrash", "stop"]
        if self._run(*inside, *limits, "--json", str(self._report)):
            return None
        (process,) = json.loads(self._report.read_text())["processes"]
        return float(process["seconds"]["rematerialization"] / process["seconds"]["operators"])

    def _run(self, *options: str, verb: str | None = None) -> int:
        command = [sys.executable, "-m", "dtrrun", *([verb] if verb else []), "--quiet", *options]
        status, _, _ = finished([*command, *self._target], ROOT, self._environment, PATIENCE)
        return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("examples", nargs="*", help=f"of {', '.join(SMALL)}; all if none is given")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--budgets", default=",".join(map(str, SHARES)))
    words = sys.argv[1:]
    ours, others = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, None)
    )
    given = parser.parse_args(ours)
    chosen = {name: SMALL[name] if others is None else others for name in given.examples or SMALL}
    shares = [int(one) for one in given.budgets.split(",")]
    ratios: tuple[list[float], list[float]] = [], []
    for name, *cells in measured(chosen, shares, given.rounds):
        print("|", " | ".join([name, *cells[0].words(), *cells[1].words()]), "|", flush=True)
        for all_of, cell in zip(ratios, cells, strict=True):
            all_of += [] if cell.ratio is None else [cell.ratio]
    for all_of in ratios:
        print(f"geometric mean {geometric_mean(all_of):.3f}, most {max(all_of):.3f}, of {len(all_of)} cells")


if __name__ == "__main__":
    main()
