"""How much memory an operator is going to allocate, asked before it runs for the first time."""

from __future__ import annotations

from contextlib import nullcontext
from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.ledger.record import Geometry
from dtrrun.runtime import formulas
from dtrrun.runtime.arguments import fill, outputs_of
from dtrrun.runtime.guards import below
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.rng import unmoved
from dtrrun.runtime.storage import rounded, size_of, storage_of

loading_ns = 0  # spent in this process on what PyTorch imports for its first shape function (torch._dynamo)


def made_by(result: Any, known: Any) -> list[torch.Tensor]:
    """Tensors in an operator's result, one for each storage that is not in `known` (ids of storages)."""
    made = {}
    for tensor in outputs_of(result, []):
        try:
            place = id(storage_of(tensor))
        except (NotImplementedError, RuntimeError):
            continue  # sparse, opaque: no plain storage
        if place not in known:
            made[place] = tensor
    return list(made.values())


def predict(
    func: Any, operator: Operator, template: list[Any], kwargs: dict[str, Any], geometries: list[Geometry]
) -> int | None:
    """Bytes that a call will allocate; None where that can't be told."""
    if not operator.grows and (operator.view or not operator.makes_tensors):
        return 0
    if operator.name.startswith("c10d."):  # allocates nothing; its shape function draws from `random`
        return 0
    if operator.dynamic:
        return _bound(geometries)
    if operator.grows:
        return by_shape_function(func, operator, template, kwargs, geometries)
    if operator.mutates:
        return 0
    storages = formulas.new_storages(func, operator, template, kwargs, geometries)
    if storages is not None:
        return sum(map(rounded, storages))
    return by_shape_function(func, operator, template, kwargs, geometries)


def _load() -> None:
    global loading_ns
    started = now_ns()
    torch.empty(1, device="meta").add(1)
    loading_ns = now_ns() - started


def by_shape_function(
    func: Any, operator: Operator, template: list[Any], kwargs: dict[str, Any], geometries: list[Geometry]
) -> int | None:
    """The same from PyTorch's own functions, which run the operator on tensors without memory."""
    try:
        with (guard := below()), guard:
            if not loading_ns:
                _load()
            tensors = [
                torch.empty_strided(geometry[0], geometry[1], dtype=geometry[3], device="meta")
                for geometry in geometries
            ]
            before = sum(size_of(storage_of(tensor)) for tensor in tensors)
            feed = iter(tensors)
            args = [_undrawn(fill(arg, feed)) for arg in template]
            named = {name: _undrawn(fill(arg, feed)) for name, arg in kwargs.items()}
            if "device" in named:
                named["device"] = torch.device("meta")
            if named.get("pin_memory"):
                named["pin_memory"] = False
            with unmoved() if operator.foreign else nullcontext():
                result = func(*args, **named)
            made = made_by(result, {id(storage_of(tensor)) for tensor in tensors})
            formulas.learn(func, template, kwargs, geometries, made)
            nbytes = sum(size_of(storage_of(tensor)) for tensor in made)
            if (
                operator.reduces
            ):  # losses: the kernel allocates the unreduced size, then resizes the tensor only
                nbytes = max([nbytes, *(rounded(tensor.numel() * tensor.itemsize) for tensor in tensors)])
            if operator.grows:
                nbytes += max(sum(size_of(storage_of(tensor)) for tensor in tensors) - before, 0)
            if operator.opaque_output >= 0:
                # The shape function knows nothing of the workspace. oneDNN's is 15 times the results on large
                # LSTM layers, and a few pages more on small ones; too much is corrected by the first call.
                nbytes = 17 * nbytes + 65536
            return nbytes
    except Exception:
        # An operator without a shape function, or with arguments that it refuses: it is measured instead.
        return None


def _undrawn(arg: Any) -> Any:
    """No generator of another device: a shape function draws nothing."""
    return None if isinstance(arg, torch.Generator) else arg


def _bound(geometries: list[Geometry]) -> int | None:
    """For outputs that depend on the data (nonzero, unique, masked_select): the most that they can be."""
    if not geometries:
        return None
    size, itemsize = geometries[0][0], geometries[0][3].itemsize
    return rounded(size.numel() * max(8 * max(len(size), 1), itemsize))
