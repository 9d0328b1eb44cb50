"""How much memory an operator is going to allocate, asked before it runs for the first time."""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.runtime.arguments import fill, outputs_of
from dtrrun.runtime.guards import below
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.record import Geometry
from dtrrun.runtime.storage import storage_of

ROUNDING = 64


def rounded(nbytes: int) -> int:
    """Bytes as PyTorch's CPU allocator hands them out: whole cache lines."""
    return (nbytes + ROUNDING - 1) & -ROUNDING


def allocated_bytes(result: Any, known: Any) -> int:
    """Bytes of the storages in an operator's result that are not in `known` (ids of storages)."""
    storages = {}
    for tensor in outputs_of(result, []):
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):
            continue  # sparse, opaque: no plain storage
        if id(storage) not in known:
            storages[id(storage)] = storage
    return sum(rounded(storage.nbytes()) for storage in storages.values())


def predict(
    func: Any, operator: Operator, template: list[Any], kwargs: dict[str, Any], geometries: list[Geometry]
) -> int | None:
    """Bytes that a call will allocate, by PyTorch's shape functions; None where they can't tell."""
    if operator.view or (operator.mutates and not operator.reshapes_storage):
        return 0
    if operator.dynamic:
        return _bound(geometries)
    try:
        with below():
            tensors = [
                torch.empty_strided(geometry[0], geometry[1], dtype=geometry[3], device="meta")
                for geometry in geometries
            ]
            feed = iter(tensors)
            args = [fill(arg, feed) for arg in template]
            named = {name: fill(arg, feed) for name, arg in kwargs.items()}
            if "device" in named:
                named["device"] = torch.device("meta")
            if named.get("pin_memory"):
                named["pin_memory"] = False
            named.pop("generator", None)
            result = func(*args, **named)
            nbytes = allocated_bytes(result, {id(storage_of(tensor)) for tensor in tensors})
            if (
                operator.reduces
            ):  # losses: the kernel allocates the unreduced size, then resizes the tensor only
                nbytes = max([nbytes, *(rounded(tensor.numel() * tensor.itemsize) for tensor in tensors)])
            if operator.opaque_output >= 0:
                # The shape function knows nothing of the workspace. oneDNN's is 15 times the results on large
                # LSTM layers, and a few pages more on small ones; too much is corrected by the first call.
                nbytes = 17 * nbytes + 65536
            return nbytes
    except Exception:
        # An operator without a shape function, or with arguments that it refuses: it is measured instead.
        return None


def _bound(geometries: list[Geometry]) -> int | None:
    """For outputs that depend on the data (nonzero, unique, masked_select): the most that they can be."""
    if not geometries:
        return None
    size, itemsize = geometries[0][0], geometries[0][3].itemsize
    return rounded(size.numel() * max(8 * max(len(size), 1), itemsize))
