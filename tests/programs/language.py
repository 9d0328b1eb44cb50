"""A small language of PyTorch programs: a program is data, a tuple of steps, each a name and plain arguments.

A printed program can be read and pasted into a regression test. The same program always does the same: steps
name their operands by place (0 is the newest tensor that the program holds), and a step that PyTorch refuses
leaves its error among what the program has seen. `steps_*.py` say what each step does.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dtrrun
from tests.conformance.programs import bits

Step = tuple[Any, ...]
Program = tuple[Step, ...]

STEPS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}
"""By name: the interpreter of a step, and the values that each of its arguments can take."""

PLACES = range(6)
HELD = 20  # tensors that a program holds at once; the oldest goes first
CAUGHT = (RuntimeError, ValueError, IndexError, TypeError, AttributeError)


class Body:
    """Stands for an argument whose values are tuples of steps."""


def step(*domains: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register an interpreter under its own name."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        STEPS[function.__name__] = function, domains
        return function

    return register


class World:
    """Everything that a running program holds."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        random.seed(7)
        self.tensors: list[torch.Tensor] = [torch.randn(12, 16), torch.sin(torch.randn(16, 12)).t()]
        self.seen: list[Any] = []  # numbers, text, errors
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.arrays: list[Any] = []
        self.leaves: list[torch.Tensor] = []
        self.averages: list[torch.Tensor] = []  # lives on across steps
        self.storages: list[torch.UntypedStorage] = []

    def keep(self, *made: torch.Tensor) -> None:
        self.tensors.extend(made)

    def pick(self, place: int) -> torch.Tensor:
        """Return the place-th newest tensor."""
        if not self.tensors:
            self.tensors.append(torch.randn(12, 16))
        return self.tensors[-1 - place % len(self.tensors)]

    def real(self, place: int) -> torch.Tensor:
        """Return the same among tensors of floating types that have elements."""
        found = [x for x in self.tensors if x.is_floating_point() and x.numel()]
        if not found:
            found = [torch.randn(12, 16)]
            self.tensors.extend(found)
        return found[-1 - place % len(found)]

    def run(self, steps: Sequence[Step], observe: Callable[[], None] = lambda: None) -> None:
        """Interpret steps; `observe` is called after each. Of PyTorch's errors, raise only BudgetError."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, *arguments in steps:
                del self.tensors[:-HELD]
                try:
                    STEPS[name][0](self, *arguments)
                except dtrrun.BudgetError:
                    raise
                except CAUGHT as error:
                    # Autograd adds gradients in place only if no dispatch mode is watching: versions differ.
                    text = re.sub(r"\bversion \d+", "version", str(error)).partition("\n")[0]
                    self.seen.append(f"{name}: {type(error).__name__}: {text}")
                    del error
                observe()

    def state(self) -> list[Any]:
        """Return all that the program could look at, as bits."""
        return bits(
            [
                self.tensors,
                [gradient_of(x) for x in (*self.tensors, *self.leaves)],
                self.leaves,
                self.averages,
                list(self.modules.values()),
                list(self.optimizers.values()),
                [array.tobytes() for array in self.arrays],
                self.seen,
                torch.get_rng_state(),
                hash(random.getstate()),
            ]
        )


def gradient_of(x: torch.Tensor) -> torch.Tensor | None:
    try:
        return x.grad if x.is_leaf or x.retains_grad else None
    except RuntimeError:  # a view whose base was overwritten in a way that autograd can't follow
        return None


def fit(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `x` in the type and size of another tensor, by operators."""
    if x.is_complex() and not like.is_complex():
        x = x.real
    if x.dtype != like.dtype:
        x = x.to(like.dtype)
    if x.shape == like.shape:
        return x
    if x.numel() >= like.numel():
        return x.reshape(-1)[: like.numel()].reshape(like.shape)
    return x.sum().to(like.dtype).expand(like.shape)


def matrix(x: torch.Tensor, columns: int = 8) -> torch.Tensor:
    """Return `x` as at least two float32 rows of this many elements."""
    x = (x.real if x.is_complex() else x).float().reshape(-1)
    rows = x.numel() // columns
    return x[: rows * columns].reshape(rows, columns) if rows >= 2 else x.sum().expand(3, columns)
