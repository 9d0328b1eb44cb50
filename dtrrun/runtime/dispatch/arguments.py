"""Flattens an operator's arguments for its signature, and rebuilds them for shape functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dtrrun.core.graph import TENSOR_SLOT
from dtrrun.runtime.guards import below
from dtrrun.runtime.storage import storage_of

VALUE, TENSOR, SEQUENCE, UNKEYED = range(4)
KINDS: dict[type, int] = {
    torch.Tensor: TENSOR,
    torch.nn.Parameter: TENSOR,
    torch.nn.Buffer: TENSOR,
    list: SEQUENCE,
    tuple: SEQUENCE,
    torch.Size: SEQUENCE,
    # These have few distinct values, and are part of a signature.
    int: VALUE,
    bool: VALUE,
    str: VALUE,
    type(None): VALUE,
    torch.dtype: VALUE,
    torch.device: VALUE,
    torch.layout: VALUE,
    torch.memory_format: VALUE,
    # Numbers that vary between steps (learning rates) don't affect cost or size.
    float: UNKEYED,
    complex: UNKEYED,
    torch.Generator: UNKEYED,
}
"""How arguments of each type are treated. `kind_of` adds types seen later."""


def kind_of(cls: type) -> int:
    """Classify a type seen for the first time."""
    if issubclass(cls, torch.Tensor):
        kind = TENSOR
    elif issubclass(cls, (list, tuple)):
        kind = SEQUENCE
    else:  # including storages: a signature must keep none alive
        kind = UNKEYED
    KINDS[cls] = kind
    return kind


def flatten_into(values: Iterable[Any], key: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    """Collect the tensors of arguments, which may be nested.

    Returns the arguments, each tensor replaced by TENSOR_SLOT. Adds to `key` what a signature needs of them.
    """
    template: list[Any] = []
    for value in values:
        kind = KINDS.get(type(value))
        if kind is None:
            kind = kind_of(type(value))
        if kind == TENSOR:
            tensors.append(value)
            template.append(TENSOR_SLOT)
            continue
        if kind == VALUE:
            key.append(value)
        elif kind == SEQUENCE:
            key.append(len(value))
            value = flatten_into(value, key, tensors)
        template.append(value)
    return template


def fill(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Undo `flatten_into`: replace each TENSOR_SLOT by the next tensor."""
    if value is TENSOR_SLOT:
        return next(tensors)
    if type(value) is list:
        return [fill(item, tensors) for item in value]
    return value


def outputs_of(result: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return all tensors in an operator's result, in order."""
    if isinstance(result, torch.Tensor):
        found.append(result)
    elif isinstance(result, (list, tuple)):
        for item in result:
            outputs_of(item, found)
    return found


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a sparse tensor consists of."""
    names = _PARTS.get(tensor.layout, ())
    if not names:
        return []
    with below(), torch._C.DisableTorchFunction():
        return [getattr(torch.Tensor, name)(tensor) for name in names]


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that requires gradients is a leaf."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        # One of several views of an overwritten base: asking autograd raises, but operators work.
        return False


def covers(tensor: torch.Tensor) -> bool:
    """Return whether writing every element of `tensor` writes every byte of its storage."""
    if tensor.numel() * tensor.element_size() != storage_of(tensor).nbytes():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
