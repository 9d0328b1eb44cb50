"""What `--heuristic auto` costs: where no step is like another, and while it searches."""

import contextlib
import io
import json
import resource
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

import dtrrun
from dtrrun.core.heuristics import INITIAL
from dtrrun.runtime.observe.learning import Learning
from tests.bench.runs import PATIENCE, ROOT, environment, finished
from tests.bench.section import Section
from tests.logs.make import SMALL

VARIES = {
    "treelstm": [*SMALL["treelstm"], "--steps", "80"],
    "random_shapes": ["--steps", "200"],
}
"""Programs in which no two steps are alike."""
REPEATS = ("resnet", "transformer", "lstm")
HALF, LITTLE = 50, 40
STEPS, NEAR, SEARCHES = 60, 10, 3
AT_MOST_VARYING, AT_MOST_SEARCHING = 1.01, 1.02

TEXT = f"""\
The lines of programs of which no step is like another compare the processor time of whole runs inside
{HALF} % of the peak: with auto, divided by that with {INITIAL}. The two take turns. The figures are the
geometric mean of the rounds, with the least and the most in brackets. "again" is a second run with
{INITIAL}, divided by the first.

The other lines are examples at the sizes of tests/logs inside {LITTLE} % of their peaks, where auto searches.
They compare the median time of the steps that are logged, or during which the search runs in another
process, with that of the steps before them and the {NEAR} steps after them: the wall time and, in brackets,
the processor time of the program alone, without the search. What the search finds is not taken, so that all
steps have the same rule. Each example runs {SEARCHES} times."""

BEFORE, LOGGED, SEARCHING, AFTER = "before", "logged", "searching", "after"


def measure(quick: bool) -> Section:
    headers = ["Program", "Compared", "Ratio", "Of"]
    section = Section("21. The cost of `--heuristic auto`", TEXT, headers)
    for program, arguments in VARIES.items():
        _varying(section, program, arguments, 1 if quick else 3)
    for program in REPEATS[:1] if quick else REPEATS:
        _searching(section, program, 1 if quick else SEARCHES)
    return section


def _add(section: Section, *cells: str) -> None:
    section.rows.append([*cells])
    print(*cells, sep=" | ", file=sys.stderr, flush=True)


# -- when no two steps are alike ----------------------------------------------------------------------


def _varying(section: Section, program: str, arguments: list[str], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        target = [sys.executable, str(_script(program)), *arguments]
        _processor_seconds(["--json", str(report)], target)
        budget = json.loads(report.read_text())["peak_bytes"] * HALF // 100
    taken: dict[str, list[float]] = {"auto": [], INITIAL: [], "again": []}
    for _ in range(rounds):
        for rule, seconds in taken.items():
            heuristic = INITIAL if rule == "again" else rule
            options = ["--budget", f"{budget}B", "--heuristic", heuristic, "--no-remember"]
            seconds.append(_processor_seconds(options, target))
    for rule in ("auto", "again"):
        ratios = [a / b for a, b in zip(taken[rule], taken[INITIAL], strict=True)]
        mean = geometric_mean(ratios)
        shown = f"{mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        _add(section, program, f"{rule} / {INITIAL}", shown, f"{rounds} rounds")
        if rule == "auto" and mean > AT_MOST_VARYING:
            section.missed.append(f"{program}: {mean:.3f} times as long, should be {AT_MOST_VARYING}")


def _script(program: str) -> Path:
    example = ROOT / "docs" / "examples" / f"{program}.py"
    return example if example.exists() else Path(__file__).parent / "scripts" / f"{program}.py"


def _processor_seconds(options: list[str], target: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "dtrrun", "--quiet", *options, *target]
    status, stderr, _ = finished(command, ROOT, environment(), PATIENCE)
    if status:
        raise RuntimeError(stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


# -- while a search runs ------------------------------------------------------------------------------


class Clock(Learning):
    """Learning that adopts no new rule, and records each step's phase and duration."""

    steps: list[tuple[str, float, float]]

    def install(self) -> None:
        super().install()
        Clock.steps, self._state, self._stamp = [], BEFORE, self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def step_ended(self) -> None:
        now = self._now()
        wall, processor = (b - a for a, b in zip(self._stamp, now, strict=True))
        self.steps.append((self._state, wall, processor))
        self._stamp = now
        super().step_ended()
        if self._recorder is not None:
            self._state = LOGGED
        elif self._search is not None:
            self._state = SEARCHING
        elif self._state == SEARCHING:
            self._state = AFTER

    def _take(self, found: dict[str, Any], source: str) -> None:
        pass


def _searching(section: Section, program: str, times: int) -> None:
    torch.set_num_threads(1)
    with _quietly(), dtrrun.budget("1TB", device="cpu") as session:
        _run(program, 2)
    budget = session.report()["peak_bytes"] * LITTLE // 100
    found: dict[str, list[tuple[float, float]]] = {LOGGED: [], SEARCHING: []}
    for _ in range(times):
        with _quietly(), _noting(), dtrrun.budget(f"{budget}B", device="cpu", heuristic="auto"):
            _run(program, STEPS)
        steps = Clock.steps[2:]  # costs have been measured, and optimizer state exists
        plain = [one for one in steps if one[0] == BEFORE] + [one for one in steps if one[0] == AFTER][:NEAR]
        usual = [median(one[k] for one in plain) for k in (1, 2)]
        for state, ratios in found.items():
            ratios += [(one[1] / usual[0], one[2] / usual[1]) for one in steps if one[0] == state]
    for state, ratios in found.items():
        if not ratios:
            section.missed.append(f"{program}: nothing was searched")
            continue
        wall, processor = (median(one[k] for one in ratios) for k in (0, 1))
        _add(section, program, f"{state} / others", f"{wall:.3f} ({processor:.3f})", f"{len(ratios)} steps")
        if state == SEARCHING and wall > AT_MOST_SEARCHING:
            section.missed.append(
                f"{program}: {wall:.3f} times as long during a search, should be {AT_MOST_SEARCHING}"
            )


def _run(program: str, steps: int) -> None:
    argv = sys.argv
    sys.argv = [str(_script(program)), *SMALL[program], "--steps", str(steps)]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = argv


@contextlib.contextmanager
def _noting() -> Iterator[None]:
    from dtrrun.runtime.observe import learning

    learning.Learning = Clock  # type: ignore[misc]
    try:
        yield
    finally:
        learning.Learning = Learning  # type: ignore[misc]


def _quietly() -> contextlib.redirect_stdout[io.StringIO]:
    return contextlib.redirect_stdout(io.StringIO())
