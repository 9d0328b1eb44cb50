"""The slowdown that dtrrun reports against the one that is measured, in sixty programs."""

import contextlib
import ctypes
import gc
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

import dtrrun
from dtrrun.core.heuristics import STEADY
from dtrrun.runtime.observe.steps import slowdown
from dtrrun.telemetry.times import effective
from tests.bench import advised
from tests.bench.runs import inside, inside_once, plain, share
from tests.bench.section import Section
from tests.bench.small_operators import PROGRAMS, Step
from tests.programs import steps_autograd, steps_mutation, steps_python, steps_tensors  # noqa: F401
from tests.programs.language import STEPS, Body, World

WITHIN = 0.07
AMPLE = "8GB"
SHARE = 60
SHARES = (80, 60)
DRAWN = 15
ATTEMPTS = 3

EXAMPLES = {
    "resnet": ["--batch-size", "8"],
    "densenet": ["--batch-size", "4"],
    "unet": ["--batch-size", "2", "--size", "64"],
    "transformer": ["--batch-size", "2"],
    "lstm": ["--batch-size", "64"],
    "treelstm": ["--batch-size", "16", "--min-leaves", "20", "--max-leaves", "30"],
    "unrolled_gan": ["--batch-size", "256"],
    "vae": ["--batch-size", "8"],
    "amp": ["--batch-size", "16"],
}
"""The examples, and arguments with which a step takes a few hundredths of a second."""

LARGEST = 2**25
"""The largest threshold in bytes that glibc takes."""
KEEPS = {
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={LARGEST}:glibc.malloc.trim_threshold={2**30}",
}

TEXT = f"""\
How much longer a step takes, as the report says it (`step_slowdown_estimate`), and in fact. Each program runs
plain and under dtrrun in turn, several times. Measured is a step's processor time under dtrrun, divided by
that of the same step in the plain runs. Either is the least of the rounds, since other processes on the
machine only ever add to it. The figure is the median of the steps after the first ones. dtrrun does not
search for a better rule meanwhile. Memory that is freed stays with the process, since PyTorch's allocator
would otherwise return it to the system or not, depending on what was allocated before.

There are four kinds of programs:

- ten whose steps are 1,000 to 8,000 small operators, in a budget that never binds, so that all they lose is
  dtrrun's own work;
- the examples with small batches inside {SHARES[0]} % and {SHARES[1]} % of their peaks, each run in a
  process of its own;
- {len(advised.PROGRAMS)} small programs of many kinds (`tests/bench/advised.py`) inside {SHARE} %, where a
  run counts as a step;
- {DRAWN} programs that are drawn at random from the steps of `tests/programs` inside {SHARE} %, likewise.

Where a budget is too small, the program runs inside the one that its error advises; "60 → 83 %" means that
the first advice was enough. What is said should be within {WITHIN:.0%} of what is measured."""


@dataclass
class Timed:
    """The same steps, run several times: seconds by round and step, and what was said in each round."""

    plain: list[list[float]] = field(default_factory=list)
    ours: list[list[float]] = field(default_factory=list)
    said: list[float] = field(default_factory=list)
    budget: str = "ample"

    @property
    def measured(self) -> float:
        least = [[min(step) for step in zip(*rounds, strict=True)] for rounds in (self.ours, self.plain)]
        return median(ours / alone for ours, alone in zip(*least, strict=True))


def keep_memory() -> None:
    """Keep freed memory with this process, as `KEEPS` does for others."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, LARGEST)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


# -- in one process ------------------------------------------------------------------------------


def seconds_of(step: Step, count: int, told: Callable[[], None] = lambda: None) -> list[float]:
    """Return the processor time of each of some steps; `told` is called after each."""
    took = []
    for _ in range(count):
        start = time.process_time()
        step()
        took.append(time.process_time() - start)
        told()
    return took


def session_in(budget: int | str | None) -> Any:
    return dtrrun.budget(budget, "cpu", heuristic=STEADY)  # no search in the background


def in_process(make: Callable[[], Step], budget: int | str, rounds: int, first: int, steps: int) -> Timed:
    """first: steps that are not counted. Raises BudgetError."""
    timed = Timed()
    for _ in range(rounds):
        for ours in (False, True):
            gc.collect()
            torch.manual_seed(0)
            step = make()
            with (
                dtrrun.budget(budget, "cpu", heuristic=STEADY)
                if ours
                else contextlib.nullcontext() as session
            ):
                seconds_of(step, first)
                if session is None:
                    timed.plain.append(seconds_of(step, steps))
                    continue
                said, totals = [], [session.times()]

                def told(said=said, totals=totals, session=session) -> None:
                    totals.append(session.times())
                    step = {name: totals[-1][name] - totals[-2][name] for name in totals[-1]}
                    said.append(slowdown(effective(step)))

                timed.ours.append(seconds_of(step, steps, told))
                timed.said.append(median(said))
    return timed


def in_a_share(make: Callable[[], Step], percent: int, rounds: int, first: int, steps: int) -> Timed:
    """Measure inside a share of the peak, or what the errors advise."""
    with session_in(None) as session:
        torch.manual_seed(0)
        seconds_of(make(), first + steps)
        peak = session.report()["peak_bytes"]
    budgets = [share(percent, peak)]
    while True:
        try:
            timed = in_process(make, budgets[-1], rounds, first, steps)
        except dtrrun.BudgetError as error:
            if len(budgets) == ATTEMPTS:
                raise
            budgets.append(error.expected_bytes or peak)
        else:
            timed.budget = tried(budgets, peak)
            return timed


def tried(budgets: Sequence[int], peak: int) -> str:
    return " → ".join(f"{100 * budget / peak:.0f}" for budget in budgets) + " %"


def drawn(seed: int) -> Callable[[], Step]:
    """Return a program of random steps, always the same one for a seed."""
    draw = random.Random(seed)

    def one(depth: int) -> tuple[Any, ...]:
        name = draw.choice([name for name, (_, domains) in STEPS.items() if depth or Body not in domains])
        domains = STEPS[name][1]
        return name, *(
            tuple(one(0) for _ in range(3)) if domain is Body else draw.choice(list(domain))
            for domain in domains
        )

    program = tuple(one(1) for _ in range(20))
    return lambda: lambda: World().run(program)


# -- the examples --------------------------------------------------------------------------------


def example(name: str, percent: int, rounds: int, arguments: Sequence[str]) -> Timed:
    peak = inside_once(None, name, "--steps", "3", *arguments).report["peak_bytes"]
    budgets = [share(percent, peak)]
    arguments = ["--steps", "10", *arguments]
    timed = Timed()
    while len(timed.said) < rounds:
        run = inside(budgets[-1], name, *arguments, **KEEPS)
        if run.infeasible and len(budgets) < ATTEMPTS:
            budgets.append(run.report["error"]["expected_bytes"] or peak)
            continue
        alone = plain(name, *arguments, **KEEPS)
        if not (run.capture and alone.capture):
            raise RuntimeError(run.stderr[-500:] or alone.stderr[-500:])
        timed.ours.append(run.capture["step_seconds"][2:])
        timed.plain.append(alone.capture["step_seconds"][2:])
        timed.said.append(run.report["step_slowdown_estimate"])
    timed.budget = tried(budgets, peak)
    return timed


# -- the table -----------------------------------------------------------------------------------


def small(program: Callable[[], Step], rounds: int = 5, steps: int = 6) -> Timed:
    """Measure a program of small operators, in a budget that never binds."""
    return in_process(program, AMPLE, rounds, 3, steps)


def repeated(program: Callable[[], None]) -> Callable[[], Step]:
    return lambda: program


def everything(quick: bool) -> Iterator[tuple[str, Callable[[], Timed]]]:
    rounds = 3 if quick else 5
    for program in PROGRAMS:
        yield program.__name__, lambda program=program: small(program, rounds)
    for name, percent in itertools.product(EXAMPLES, SHARES[-1:] if quick else SHARES):
        yield name, lambda name=name, percent=percent: example(name, percent, rounds // 2, EXAMPLES[name])
    for whole in advised.PROGRAMS:
        make = repeated(whole)
        yield whole.__name__, lambda make=make: in_a_share(make, SHARE, rounds, 1, 3)
    for seed in range(3 if quick else DRAWN):
        make = drawn(seed)
        yield f"random {seed}", lambda make=make: in_a_share(make, SHARE, rounds, 2, 6)


def measure(quick: bool) -> Section:
    torch.set_num_threads(1)
    keep_memory()
    headers = ["Program", "Budget", "Said", "Measured", "Said / measured"]
    section = Section("26. The slowdown that is said", TEXT, headers)
    ratios = []
    for name, run in everything(quick):
        title = name.replace("_", " ")
        try:
            timed = run()
        except (dtrrun.BudgetError, RuntimeError) as error:
            section.missed.append(f"{title}: did not run: {str(error).splitlines()[0]}")
            continue
        said, measured = median(timed.said), timed.measured
        ratios.append(said / measured)
        section.rows.append([title, timed.budget, f"{said:.2f}", f"{measured:.2f}", f"{ratios[-1]:.2f}"])
        print(*section.rows[-1], sep=" | ", file=sys.stderr, flush=True)
        if abs(ratios[-1] - 1) > WITHIN:
            section.missed.append(f"{title}: {ratios[-1]:.2f}, should be within {WITHIN:.0%} of 1")
    section.text += "\n\n" + distribution(ratios)
    return section


def distribution(ratios: Sequence[float]) -> str:
    off = sorted(abs(ratio - 1) for ratio in ratios)
    return (
        f"It was for {sum(one <= WITHIN for one in off)} of {len(off)}. Half of them were within "
        f"{median(off):.1%}, nine of ten within {off[int(0.9 * len(off))]:.0%}, and all within {off[-1]:.0%}."
    )
