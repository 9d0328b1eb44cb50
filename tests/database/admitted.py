"""Finds operators that write to arguments that their schema does not declare as written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtrrun.runtime.dispatch.arguments import flatten_into
from dtrrun.runtime.operators import operator_of
from tests.database.replicas import tensors

SCRATCH = {("aten::mkldnn_rnn_layer_backward", 22)}
"""Parts of oneDNN's workspace that nothing reads: a second backward pass has the same gradients."""


class Watch(TorchDispatchMode):
    """Compares every operator's inputs with copies made before it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.unadmitted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        before = [
            (where, tensor, tensor.clone())
            for where, tensor in _unwritten(func, args, kwargs)
            if tensor.layout == torch.strided and not tensor.is_quantized and tensor.numel()
        ]
        result = func(*args, **kwargs)
        for where, tensor, copy in before:
            if not _same(tensor, copy) and (func._schema.name, where) not in SCRATCH:
                self.unadmitted.append(f"{func} writes to argument {where} and does not say so")
        return result


def _unwritten(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[int | str, torch.Tensor]]:
    """Yield the tensors that the runtime thinks the operator does not write to, directly or as an alias."""
    operator = operator_of(func)
    if operator.reshapes_storage or operator.view:
        return
    statistics = operator.statistics.positions if operator.statistics is not None else ()
    named = [*enumerate(args), *kwargs.items()]
    written = {
        tensor.untyped_storage()._cdata
        for where, arg in named
        if where in operator.mutates or where in statistics
        for tensor in tensors(arg)
        if tensor.layout == torch.strided
    }
    for where, arg in named:
        found: list[torch.Tensor] = []
        flatten_into((arg,), [], found)
        for tensor in found:
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in written:
                yield where, tensor


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or _bytes(one) == _bytes(other)  # NaN is not equal to itself


def _bytes(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()
    return found


@contextmanager
def watched() -> Iterator[list[str]]:
    """Watch every operator inside; yield the list of findings."""
    with Watch() as watch:
        yield watch.unadmitted
