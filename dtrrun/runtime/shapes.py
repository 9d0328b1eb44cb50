"""Predicts how much memory an operator will allocate, before its first run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.core.graph import Geometry
from dtrrun.runtime.dispatch.arguments import fill, outputs_of
from dtrrun.runtime.guards import below, silently
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.rng import unmoved
from dtrrun.runtime.storage import rounded, size_of, storage_of

_RETURN_THEIR_INPUT = {"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}
_MASKS = (torch.bool, torch.uint8)  # as indices: how many elements they select depends on data

loading_ns = 0  # time in this process spent on imports (sympy, …) for PyTorch's first shape function


def made_by(result: Any, known: Any) -> list[torch.Tensor]:
    """Return the tensors in an operator's result, one for each storage not in `known` (ids of storages)."""
    made = {}
    for tensor in outputs_of(result, []):
        try:
            place = storage_of(tensor)._cdata
        except (NotImplementedError, RuntimeError):
            continue  # sparse or opaque: no plain storage
        if place not in known:
            made[place] = tensor
    return list(made.values())


def predict(
    func: Any,
    operator: Operator,
    template: list[Any],
    kwargs: dict[str, Any],
    geometries: list[Geometry],
    by_formula: Callable[[], int | None],
) -> int | None:
    """Return the bytes that a call will allocate; None if unknown.

    by_formula: returns what a formula says, None if there is none.
    """
    if not operator.grows and (operator.view or not operator.makes_tensors):
        return 0
    if operator.name == "aten.index" and not any(geometry[3] in _MASKS for geometry in geometries[1:]):
        return by_shape_function(func, operator, template, kwargs, geometries)
    # These allocate nothing, whatever their shape functions say, which may draw from `random`.
    if operator.name.startswith("c10d.") or operator.name in _RETURN_THEIR_INPUT:
        return 0
    bound = _BOUNDS.get(operator.name, _elements_and_places) if operator.dynamic else None
    if bound is not None:
        return bound(geometries)
    if operator.grows:
        return by_shape_function(func, operator, template, kwargs, geometries)
    found = by_formula()
    if found is not None:
        return found
    return by_shape_function(func, operator, template, kwargs, geometries)


def _load() -> None:
    global loading_ns
    started = now_ns()
    torch.empty(1, device="meta").add(1)
    loading_ns = now_ns() - started


WITH_WORKSPACE = {"aten.mkldnn_rnn_layer": 17, "aten._cudnn_rnn": 32, "aten.cudnn_batch_norm": 2}
"""An operator's total allocation, as a multiple of its results. oneDNN's workspace is 15 times the results on
large LSTM layers, and a few pages more on small ones; cuDNN's was 25 times an LSTM's (on an H100), besides
what it keeps for the backward pass. For a batch norm it keeps a bit per element, and often nothing."""


def by_shape_function(
    func: Any, operator: Operator, template: list[Any], kwargs: dict[str, Any], geometries: list[Geometry]
) -> int | None:
    """Like `predict`, using PyTorch's own shape functions, which run the operator on meta tensors."""
    run = partial(_by_shape_function, func, operator, template, kwargs, geometries)
    return silently(run, recorded=False)  # type: ignore[no-any-return]


def _by_shape_function(
    func: Any, operator: Operator, template: list[Any], kwargs: dict[str, Any], geometries: list[Geometry]
) -> int | None:
    workspace = operator.opaque_output >= 0
    if operator.name == "aten.mkldnn_rnn_layer":
        workspace = torch.is_grad_enabled()  # the program's, which `below` changes
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
            made = made_by(result, {storage_of(tensor)._cdata for tensor in tensors})
            nbytes = sum(size_of(storage_of(tensor)) for tensor in made)
            if operator.reduces:
                unreduced = torch.broadcast_shapes(*[tensor.size() for tensor in tensors]).numel()
                nbytes = max(nbytes, rounded(unreduced * max(tensor.itemsize for tensor in tensors)))
            if operator.name in _UNSAID:
                nbytes += _UNSAID[operator.name](geometries)
            if operator.grows:
                nbytes += max(sum(size_of(storage_of(tensor)) for tensor in tensors) - before, 0)
            if workspace:
                # The shape function does not include the workspace; the first call corrects an overestimate.
                nbytes = WITH_WORKSPACE[operator.name] * nbytes + 65536
            return nbytes
    except Exception:
        # No shape function, or unsupported arguments: the allocation is measured instead.
        return None


def _undrawn(arg: Any) -> Any:
    """Remove generators, which are of another device: a shape function draws nothing."""
    return None if isinstance(arg, torch.Generator) else arg


# Upper bounds for outputs that depend on data.


def _elements_and_places(geometries: list[Geometry]) -> int | None:
    """nonzero, …: all elements, or the index of each of them."""
    if not geometries:
        return None
    size, itemsize = geometries[0][0], geometries[0][3].itemsize
    return rounded(size.numel() * max(8 * max(len(size), 1), itemsize))


def _unique(geometries: list[Geometry]) -> int:
    """unique: all elements, the place of each among them, and how often each occurs."""
    size, _, _, dtype, *_ = geometries[0]
    return rounded(size.numel() * dtype.itemsize) + 2 * rounded(8 * size.numel())


def _selected(geometries: list[Geometry]) -> int | None:
    """masked_select: all elements of the tensor and the mask, broadcast together."""
    if len(geometries) < 2:
        return None
    (size, _, _, dtype, *_), (mask, *_) = geometries[:2]
    try:
        return rounded(torch.broadcast_shapes(size, mask).numel() * dtype.itemsize)
    except RuntimeError:
        return 0  # it will raise


def _solved(geometries: list[Geometry]) -> int | None:
    """linalg_lstsq: a solution, residuals, ranks and singular values."""
    return sum(rounded(size.numel() * dtype.itemsize) + 128 for size, _, _, dtype, *_ in geometries)


def _aligned(geometries: list[Geometry]) -> int | None:
    """_ctc_loss: losses, and for each time step the targets, interleaved with blanks."""
    if len(geometries) < 2 or not geometries[1][0]:
        return None
    (size, _, _, dtype, *_), (targets, *_) = geometries[:2]
    steps, batch = size[0], size[1] if len(size) > 2 else 1
    return rounded(steps * batch * (2 * targets[-1] + 1) * dtype.itemsize) + rounded(batch * dtype.itemsize)


def _per_bag(geometries: list[Geometry]) -> int:
    """_embedding_bag: its shape function omits one result, and one element of another."""
    return rounded(8 * geometries[2][0].numel()) + rounded(8)


_UNSAID: dict[str, Callable[[list[Geometry]], int]] = {
    "aten._embedding_bag": _per_bag,
    "aten._embedding_bag_forward_only": _per_bag,
}


_BOUNDS: dict[str, Callable[[list[Geometry]], int | None]] = {
    "aten._unique": _unique,
    "aten._unique2": _unique,
    "aten.unique_consecutive": _unique,
    "aten.unique_dim": _unique,
    "aten.unique_dim_consecutive": _unique,
    "aten.masked_select": _selected,
    "aten.linalg_lstsq": _solved,
    "aten._ctc_loss": _aligned,
}
