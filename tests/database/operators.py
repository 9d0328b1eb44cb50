"""PyTorch's operator database: every operator with its samples, as programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.database.judge import Probe, Program
from tests.database.replicas import Replicas, tensors

SAMPLES = 6  # maximum per operator, variant and data type
TWICE = 2  # of these, with gradients of gradients
SECOND_DTYPES = (torch.bfloat16, torch.complex64, torch.int64)


UNREPEATABLE = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    "linalg.lstsq",
}
"""These return uninitialised memory, or (gelsy's pivots) start from it; not every call shows it."""


class Case(NamedTuple):
    """One program: an operator's variant on one sample. `repeats`: it should give the same every time."""

    name: str
    program: Program
    repeats: bool = True


def names() -> list[str]:
    return sorted({name_of(info) for info in op_db})


def name_of(info: Any) -> str:
    return ".".join(filter(None, (info.name, info.variant_test_name)))


def cases(name: str) -> Iterator[Case]:
    for place, info in enumerate(op_db):
        if name_of(info) == name:
            for dtype in _dtypes(info, place):
                for turn, (which, sample) in enumerate(samples(info, dtype)):
                    twice = info.supports_gradgrad and dtype == torch.float32 and turn < TWICE
                    for variant, program in _programs(info, sample, twice):
                        told = f"{name} {variant} {dtype} sample {which}"
                        yield Case(told, program, name not in UNREPEATABLE)


def _dtypes(info: Any, place: int) -> list[torch.dtype]:
    """Return float32 and one other, in rotation; any one if neither is supported."""
    supported = info.supported_dtypes("cpu")
    turn = place % len(SECOND_DTYPES)
    others = [dtype for dtype in SECOND_DTYPES[turn:] + SECOND_DTYPES[:turn] if dtype in supported][:1]
    chosen = [torch.float32] * (torch.float32 in supported) + others
    return chosen or sorted(supported, key=str)[:1]


def samples(info: Any, dtype: torch.dtype) -> list[tuple[int, Any]]:
    """Return samples spread evenly over all of them, including the first and the last."""
    gradients = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    found = list(info.sample_inputs("cpu", dtype, requires_grad=gradients))
    last = len(found) - 1
    places = sorted({round(turn * last / (SAMPLES - 1)) for turn in range(SAMPLES)}) if found else []
    return [(place, found[place]) for place in places]


def _programs(info: Any, sample: Any, twice: bool) -> Iterator[tuple[str, Program]]:
    yield "", partial(_call, info.op, sample, twice)
    if info.inplace_variant is not None:
        yield "in place", partial(_call_in_place, info.inplace_variant, sample)
    if info.supports_out:
        yield "out=", partial(_call_out, info.op, sample, False)
        yield "out= resized", partial(_call_out, info.op, sample, True)


def arguments(copies: Replicas, sample: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return copies.of(sample.input), copies.of(tuple(sample.args)), copies.of(dict(sample.kwargs))


def _call(function: Any, sample: Any, twice: bool, probe: Probe) -> Any:
    copies = Replicas()
    first, args, kwargs = arguments(copies, sample)
    probe()
    result = function(first, *args, **kwargs)
    probe(result)
    return [described(result), _gradients(result, copies.leaves, twice, probe), first, args, kwargs]


def _call_in_place(function: Any, sample: Any, probe: Probe) -> Any:
    copies = Replicas(inner=True)
    first, args, kwargs = arguments(copies, sample)
    whole = first.view_as(first) if isinstance(first, torch.Tensor) and first.is_leaf else first
    probe()
    result = function(whole, *args, **kwargs)
    probe(result)
    return [described(result), _gradients(result, copies.leaves, False, probe), first, args, kwargs]


def _call_out(function: Any, sample: Any, resized: bool, probe: Probe) -> Any:
    copies = Replicas()
    with torch.no_grad():
        first, args, kwargs = arguments(copies, sample)
        out = blanks(function, first, args, kwargs, resized)
        if out is None:
            return "no tensors"
        probe()
        result = function(first, *args, **kwargs, out=out)
        probe(result)
    return [described(result), out, first, args, kwargs]


def blanks(function: Any, first: Any, args: Any, kwargs: Any, resized: bool = False) -> Any:
    """Return what to pass as `out=`: tensors like the results, or None if those are no tensors."""
    with torch.no_grad():
        wanted = function(first, *args, **kwargs)
    if isinstance(wanted, torch.Tensor):
        return _blank(wanted, resized)
    if isinstance(wanted, (tuple, list)) and all(isinstance(one, torch.Tensor) for one in wanted):
        return tuple(_blank(one, resized) for one in wanted)
    return None


def _blank(like: torch.Tensor, resized: bool) -> torch.Tensor:
    """Return a target for a result: of its size and strides, or empty; with a recipe of its own."""
    if resized:
        return torch.zeros(0, dtype=like.dtype)
    return torch.zeros_like(like).clone() if like.layout == torch.strided else torch.zeros_like(like)


def _gradients(result: Any, leaves: list[torch.Tensor], twice: bool, probe: Probe) -> Any:
    outputs = [one for one in tensors(result) if one.requires_grad]
    if not outputs or not leaves:
        return None
    first = torch.autograd.grad(outputs, leaves, ramp(outputs), create_graph=twice, allow_unused=True)
    probe(first)
    again = [one for one in first if one is not None and one.requires_grad]
    second = None
    if again:
        second = torch.autograd.grad(again, leaves, ramp(again), allow_unused=True)
        probe(second)
    return [first, second]


def ramp(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients for these outputs: not all equal, so that a permutation shows, and of both signs.

    The first is negative, so that the sign of zeros shows if there is only one.
    """
    made = [-torch.ones_like(one) for one in outputs]
    for one in made:
        if one.layout == torch.strided:
            with suppress(RuntimeError):
                one.view(-1).add_(torch.linspace(0, 3, one.numel()))
    return made


def described(result: Any) -> Any:
    """Return a result, and what its bits do not show."""
    about = [[str(one.layout), one.requires_grad, one.is_leaf, one._is_view()] for one in tensors(result)]
    return [result, about]
