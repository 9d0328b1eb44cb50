"""Runs whose decisions are frozen: the examples, and random programs.

What is evicted, recomputed, dropped or kept must not depend on the machine. So costs are modeled, and Python
collects garbage only when dtrrun asks for it. Each run has its own process.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dtrrun
from dtrrun.core.heuristics import STEADY
from tests.programs.language import STEPS, Body, Program, World
from tests.programs.running import settle

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
STEPS_OF_EXAMPLES = 3  # those with foresight know a step once they have seen two
SIZES = {
    "amp": "--batch-size 16 --depth 6",
    "densenet": "--batch-size 10",
    "lstm": "--batch-size 256 --max-length 20",
    "resnet": "--batch-size 48",
    "transformer": "--batch-size 6",
    "treelstm": "--batch-size 96 --min-leaves 20 --max-leaves 30",
    "unet": "--batch-size 5",
    "unrolled_gan": "--batch-size 2048",
    "vae": "--batch-size 32",
}
"""Smaller than the examples' own, to take a fraction of the time."""
SHARES = (70, 50, 40)  # percent of the peak without a budget
HEURISTICS = (STEADY,)
OTHERS = ("h_dtr", "h_dtr_eq", "h_next", "lru", "msps")  # only inside the second share

BLOCKS, PROGRAMS = 50, 100  # blocks, and programs in each
HERE = int(os.environ.get("DECISIONS", "0"))
"""In a mutant's process: how many programs of a block are run."""
LENGTHS = range(8, 21)
SHARES_OF_PROGRAMS = (-0.1, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
"""How far the budget lies from the peak with everything evicted (0) towards the program's own (1)."""
HEURISTICS_OF_PROGRAMS = (
    *("h_dtr", "h_dtr_eq", "h_dtr_local", "lru", "msps", STEADY, "h_next"),
    *("size", "e_star", "h'(s=yes,m=no,c=eqclass)"),
)

CRASHES = (1813, 4273)
"""Seeds of programs that crash the process within PyTorch, also without dtrrun."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "dtrrun.runtime.session", "tests.decisions.runs"])


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a fresh process. Raise RuntimeError if it raises or dies.

    If DECISIONS is set, this process, a mutant's, is fresh enough.
    """
    if HERE:
        _prepare()
        return function(*arguments)
    here, there = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_child, args=(there, function, arguments))
    child.start()
    there.close()
    try:
        result, error = here.recv()
    except EOFError:
        child.join()
        result, error = None, f"it ended with {child.exitcode}"
    child.join()
    if error:
        raise RuntimeError(f"{function.__name__}{arguments}: {error}")
    return result


def _child(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    _prepare()
    try:
        pipe.send((function(*arguments), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def _prepare() -> None:
    torch.set_num_threads(1)
    gc.disable()


# -- examples ------------------------------------------------------------------------------------------------


def _run(name: str) -> None:
    path = EXAMPLES / f"{name}.py"
    sys.argv = [str(path), "--steps", str(STEPS_OF_EXAMPLES), *SIZES[name].split()]
    runpy.run_path(str(path), run_name="__main__")


def operators_of(name: str) -> str:
    """Return a digest of an example's operators and of the sizes of their results, without dtrrun."""
    seen = Seen()
    with seen:
        _run(name)
    return seen.digest.hexdigest()[:16]


class Seen(TorchDispatchMode):
    """Sees the operators of a program."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        made = results if isinstance(results, (list, tuple)) else (results,)
        sizes = [(tuple(one.shape), str(one.dtype)) for one in made if isinstance(one, torch.Tensor)]
        self.digest.update(f"{func} {sizes}\n".encode())
        return results


def peak_of(name: str) -> int:
    """Return the peak of an example's tensors without a budget, in bytes."""
    with dtrrun.budget(None, cost="model", device="cpu") as session:
        _run(name)
        return int(session.ledger.peak_bytes)


def decisions_of(name: str, heuristic: str, budget_bytes: int) -> str:
    """Return the number of decisions in a run of an example, and their digest."""
    with dtrrun.budget(budget_bytes, heuristic=heuristic, cost="model", device="cpu") as session:
        try:
            _run(name)
        except dtrrun.BudgetError:
            return f"{told(session)} refused"
        return told(session)


def told(session: Any) -> str:
    """Return the number of decisions so far, and their digest."""
    return f"{session.ledger.decisions} {session.ledger.digest:016x}"


# -- random programs -----------------------------------------------------------------------------------------


def program_of(draw: random.Random) -> Program:
    """Draw a program, in the way of `tests.programs.drawing`. It depends only on the seed."""
    flat = sorted(name for name, (_, domains) in STEPS.items() if Body not in domains)
    nested = sorted(set(STEPS) - set(flat))

    def step(name: str) -> tuple[Any, ...]:
        return (name, *(body() if domain is Body else draw.choice(list(domain)) for domain in STEPS[name][1]))

    def body() -> Program:
        return tuple(step(draw.choice(flat)) for _ in range(draw.randint(1, 5)))

    some = (*flat * 5, *nested * 5)
    return tuple(step(draw.choice(some)) for _ in range(draw.choice(LENGTHS)))


def drawn(number: int) -> Iterator[tuple[Program, str, float]]:
    """Draw the programs of a block, each with a heuristic and a share."""
    for seed in range(number * PROGRAMS, number * PROGRAMS + (HERE or PROGRAMS)):
        if seed in CRASHES:
            continue
        draw = random.Random(seed)
        yield program_of(draw), draw.choice(HEURISTICS_OF_PROGRAMS), draw.choice(SHARES_OF_PROGRAMS)


def decidable(number: int) -> Iterator[tuple[Program, str, float]]:
    """Draw those of a block without threads: what a thread releases may die a little later."""
    return (one for one in drawn(number) if "'in_thread'" not in repr(one))


def decisions_in_block(number: int) -> str:
    """Return digests of the decisions in the programs of a block, four hexadecimal digits each."""
    settle()
    decided = ""
    for one in decidable(number):
        decided += hashlib.sha256(decided_in(*one).encode()).hexdigest()[:4]
        settle()
    return decided


def operators_in_block(number: int) -> str:
    """Return what `operators_of` does, for the programs of a block."""
    seen = Seen()
    for program, *conditions in drawn(number):
        seen.digest.update(repr((program, conditions)).encode())
        with seen:
            World().run(program)
    return seen.digest.hexdigest()[:16]


def decided_in(program: Program, heuristic: str, share: float) -> str:
    """Return what `decisions_of` does, with everything evicted at every moment and inside a share."""
    least, stressed = _decide(program, heuristic, 1)
    most, _ = _decide(program, heuristic, None)
    _, decided = _decide(program, heuristic, max(1, int(least + share * (most - least))))
    return f"{stressed} {decided}"


def _decide(program: Program, heuristic: str, budget_bytes: int | None) -> tuple[int, str]:
    """Return the peak in bytes, and the decisions."""
    world, weight = World(), torch.zeros(1, requires_grad=True)
    over = "evict" if budget_bytes == 1 else "error"
    with dtrrun.budget(
        budget_bytes, heuristic=heuristic, over_budget=over, cost="model", device="cpu", quiet=True
    ) as session:
        if len(program) % 3:  # it trains: then gradients are not searched for in other ways
            torch.optim.SGD([weight])
        try:
            world.run(program)
        except dtrrun.BudgetError:
            return 0, f"{told(session)} refused"
        return int(session.ledger.peak_bytes), told(session)
