"""What dtrrun adds to an operator on tiny tensors, in units of what an empty dispatch mode adds."""

import contextlib
import itertools
import time
from statistics import median

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dtrrun
from tests.bench.section import Section

AT_MOST = 0.3

TEXT = """\
Operators on tensors of 4 × 4 run in a loop: without dtrrun, under a `TorchDispatchMode` that does nothing,
and inside `dtrrun.budget("1GB")`, in turn in one process. The times are those of one operator, and medians of
the rounds. "Added" is (dtrrun - plain) / (empty - plain). "Never the same" are a slice and a relu of it, each
time at another place, so that dtrrun has to find out each time what it will need."""


class Empty(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def mix(a, b):
    c = torch.add(a, b)
    d = torch.mul(c, b)
    e = torch.relu(d)
    f = torch.mm(e, a)
    f.add_(b)
    return f.view(-1), f.transpose(0, 1), f.sum()


LINE = torch.full((20_000,), 0.5)
places = itertools.cycle(range(len(LINE) - 16))  # more than the iterations of a round


def never_the_same(a, b):
    place = next(places)
    return torch.relu(LINE[place : place + 16])


LOOPS = {
    "add": (1, torch.add),
    "mul": (1, torch.mul),
    "relu": (1, lambda a, b: torch.relu(a)),
    "mm": (1, torch.mm),
    "sum": (1, lambda a, b: torch.sum(a)),
    "transpose": (1, lambda a, b: a.transpose(0, 1)),
    "view": (1, lambda a, b: a.view(-1)),
    "add_": (2, lambda a, b: torch.add(a, b).add_(b)),
    "never the same": (2, never_the_same),
    "mix": (8, mix),
}
"""Name: operators in an iteration, and the iteration. `add_` works on a fresh tensor each time."""


def seconds(turn, turns: int) -> float:
    a, b = torch.full((4, 4), 0.5), torch.full((4, 4), 0.25)
    for _ in range(turns // 10):
        turn(a, b)
    start = time.perf_counter()
    for _ in range(turns):
        turn(a, b)
    return (time.perf_counter() - start) / turns


def measure(quick: bool) -> Section:
    torch.set_num_threads(1)
    rounds, turns = (3, 500) if quick else (9, 3000)
    contexts = {
        "plain": contextlib.nullcontext,
        "empty": Empty,
        "dtrrun": lambda: dtrrun.budget("1GB", device="cpu"),
    }
    headers = ["Operator", "Plain", "Empty mode", "dtrrun", "Added"]
    section = Section("4. Operators on tiny tensors", TEXT, headers)
    for name, (operators, turn) in LOOPS.items():
        samples = {kind: [] for kind in contexts}
        for _ in range(rounds):
            for kind, context in contexts.items():
                with context():
                    samples[kind].append(seconds(turn, turns // operators) / operators)
        plain, empty, ours = (median(samples[kind]) for kind in contexts)
        added = (ours - plain) / (empty - plain)
        times = [f"{value * 1e6:.2f} µs" for value in (plain, empty, ours)]
        section.rows.append([name, *times, f"{added:.2f}"])
        if round(added, 2) > AT_MOST:
            section.missed.append(f"{name}: {added:.2f}, should be at most {AT_MOST}")
    return section
