"""Tensors that stand for a number of the program's, as `torch.jit.trace` makes them.

PyTorch shows them to a mode as numbers, which few operators take in place of tensors, and as results. So the
mode makes such tensors itself. They differ from others: the data types of results do not depend on theirs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from dtrrun.runtime.guards import below, without_session

DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_MARK = "_stands_for_number"


def with_tensors(places: tuple[int, ...], args: Any) -> Any:
    """Return an operator's arguments, with tensors in place of numbers at these places."""
    if not any(place < len(args) and type(args[place]) in DTYPES for place in places):
        return args
    return tuple([as_tensor(arg) if place in places else arg for place, arg in enumerate(args)])


def as_tensor(value: Any) -> Any:
    """Return a tensor that stands for a number; anything else itself."""
    kind: Any = type(value)
    if kind not in DTYPES:
        return value
    example = _example(kind)
    with below():
        tensor = example.data.set_(torch.scalar_tensor(value, dtype=DTYPES[kind]))
    tensor.__dict__[_MARK] = True
    return tensor


def stands_for_number(tensor: torch.Tensor) -> bool:
    """Return whether `as_tensor` has made this tensor."""
    return _MARK in tensor.__dict__


@cache
def _example(kind: Any) -> Any:
    """Return some tensor that stands for a number of this kind: autograd has saved one."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    included = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    with (
        without_session(),
        torch._C._ForceDispatchKeyGuard(included, keys),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        product: Any = torch.ones((), requires_grad=True) * kind(1)
    return product.grad_fn._saved_other
