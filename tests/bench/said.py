"""The slowdown that dtrrun reports against the one that is measured, in steps of many small operators."""

import contextlib
import sys
import time
from statistics import median

import torch

import dtrrun
from tests.bench.runs import TINY, inside, inside_once, plain, share
from tests.bench.section import Section
from tests.bench.small_operators import PROGRAMS

WITHIN = 0.07
SHARE = 80

TEXT = f"""\
What the report says a step costs (`step_slowdown_estimate`), and what it costs: the median processor
time of a step, divided by that of the plain step of the same round. Both are medians of the rounds,
with the least and the most in brackets. The first ten programs make steps of 1,000 to 8,000 small
operators in a budget that never binds, so all that they lose is dtrrun's own work. The examples run
once, inside {SHARE} % of their peaks, with arguments that make their tensors small. The report's figure
should be within {WITHIN:.0%} of the measured one, on a busy machine, too."""


def processor_seconds(step, steps: int) -> float:
    """Return the median over some steps."""
    took = []
    for _ in range(steps):
        start = time.process_time()
        step()
        took.append(time.process_time() - start)
    return median(took)


def small(program, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Return what is measured and what is said, in each round."""
    measured, said = [], []
    for _ in range(rounds):
        took = {}
        for kind in ("plain", "dtrrun"):
            torch.manual_seed(0)
            step = program()
            with contextlib.nullcontext() if kind == "plain" else dtrrun.budget("8GB", "cpu") as session:
                for _ in range(3):
                    step()
                took[kind] = processor_seconds(step, steps)
                if session is not None:
                    said.append(session.report()["step_slowdown"])
        measured.append(took["dtrrun"] / took["plain"])
    return measured, said


def example(name: str, rounds: int, *arguments: str) -> tuple[list[float], list[float]]:
    peak = inside_once(None, name, *arguments).report["peak_bytes"]
    measured, said = [], []
    for _ in range(rounds):
        alone, run = plain(name, *arguments), inside(share(SHARE, peak), name, *arguments)
        if alone.capture and run.capture:
            measured.append(
                median(run.capture["step_seconds"][2:]) / median(alone.capture["step_seconds"][2:])
            )
            said.append(run.report["step_slowdown_estimate"])
    return measured, said


def measure(quick: bool) -> Section:
    torch.set_num_threads(1)
    section = Section(
        "26. The slowdown that is said", TEXT, ["Program", "Said", "Measured", "Said / measured"]
    )
    rounds, steps = (3, 8) if quick else (5, 10)
    for program in PROGRAMS:
        add(section, program.__name__.replace("_", " "), *small(program, rounds, steps))
    for name, small_arguments in TINY.items():
        add(section, name, *example(name, 1, "--steps", "6", *small_arguments))
    return section


def add(section: Section, name: str, measured: list[float], said: list[float]) -> None:
    if not measured:
        section.missed.append(f"{name}: did not run")
        return
    ratio = median(said) / median(measured)
    row = [f"{median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in (said, measured)]
    section.rows.append([name, *row, f"{ratio:.2f}"])
    print(*section.rows[-1], sep=" | ", file=sys.stderr, flush=True)
    if abs(ratio - 1) > WITHIN:
        section.missed.append(f"{name}: {ratio:.2f}, should be within {WITHIN:.0%} of 1")
