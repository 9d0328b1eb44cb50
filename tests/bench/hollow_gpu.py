"""A GPU that computes nothing, for programs of full size: tensors get their shapes and no content.

Over the fake GPU of tests/unit. Memory is asked from the system and not touched, so that a step of 12 GB
needs little of it; what is allocated, evicted and recomputed is as with content.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from fake_gpu import FakeGpu, fake_session, storage_of
from fake_growing import Growing

__all__ = ["Growing", "HollowGpu", "fake_session"]

REAL = ("aten::set_", "aten::resize_", "aten::_unsafe_view")  # the last is a view, and does not say so
COUNTERS = 2  # elements: an optimizer's count of steps, whose value the host reads, is computed


class HollowGpu(FakeGpu):
    """An operator costs the time of its shape function, and that once a signature."""

    def __init__(self, context: int) -> None:
        super().__init__(context)
        self.allocator = Growing()
        self._shapes: dict[Any, Any] = {}

    def kernel(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func.is_view or name.startswith(REAL):
            return func(*args, **kwargs)
        if read and sum(tensor.numel() for tensor in read) <= COUNTERS:
            return super().kernel(func, name, args, kwargs)
        if func._schema.is_mutable:
            return written(func, args, kwargs)
        result = tree_map_only(Shape, Shape.tensor, self.shapes(func, args, kwargs))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor).nbytes():
                storage = storage_of(tensor)
                self.allocator.enter(storage, self.allocator.reserve(storage.nbytes()))
        return result

    def shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator's results, with a `Shape` for each tensor."""
        key = func, repr(tree_map_only(torch.Tensor, shape_of, (args, kwargs)))
        found = self._shapes.get(key)
        if found is None:
            meta_args, meta_kwargs = tree_map_only(torch.Tensor, on_meta, (args, kwargs))
            if "device" in meta_kwargs:
                meta_kwargs["device"] = torch.device("meta")
            meta_kwargs.pop("pin_memory", None)
            result = func(*meta_args, **meta_kwargs)
            found = self._shapes[key] = tree_map_only(torch.Tensor, Shape, result)
        return found


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


class Shape:
    """What a result is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self.stride = shape_of(tensor)

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator returns that writes to its arguments."""
    schema = func._schema
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    targets = {
        alias: named.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    results = [targets[next(iter(one.alias_info.before_set))] for one in schema.returns]
    return results[0] if len(results) == 1 else tuple(results) if results else None
