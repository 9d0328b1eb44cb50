"""The memory that training needs whatever the budget: parameters, gradients and optimizer state.

Computed once, when a budget is too small, so nothing has to be tracked for it: parameters and optimizers are
found among Python's objects, even if they predate the session.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtrrun.runtime.dispatch.arguments import is_leaf
from dtrrun.runtime.storage import rounded

COPIES: dict[str, Callable[[dict[str, Any]], int]] = {
    "SGD": lambda group: 1 if group.get("momentum") else 0,
    "Adam": lambda group: 3 if group.get("amsgrad") else 2,
    "AdamW": lambda group: 3 if group.get("amsgrad") else 2,
    "SparseAdam": lambda group: 2,
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "Adamax": lambda group: 2,
    "Adadelta": lambda group: 2,
    "Rprop": lambda group: 2,
    "Adagrad": lambda group: 1,
    "ASGD": lambda group: 1,
    "Muon": lambda group: 1,
    "RMSprop": lambda group: 1 + bool(group.get("centered")) + bool(group.get("momentum")),
    "Adafactor": lambda group: 0,  # a row and a column per matrix
}
"""How many tensors of a parameter's size PyTorch's optimizers keep, by class and options."""


def training_memory(device_type: str) -> dict[str, int | None]:
    """Return the bytes of `parameters`, `gradients` and `optimizer`, including those not yet allocated.

    `optimizer` is None if one has not stepped and is of an unknown class. Gradients are those of all
    parameters that require them; none are assumed in a program without an optimizer that computes without
    gradients.
    """
    parameters: dict[int, torch.Tensor] = {}
    optimizers: list[torch.optim.Optimizer] = []
    kinds: dict[type, Any] = {}  # a million objects have a few thousand types
    for found in gc.get_objects():
        cls = type(found)  # isinstance() would ask lazy proxies among all objects for their __class__
        try:
            kind = kinds[cls]
        except KeyError:
            kind = next((one for one in (torch.Tensor, torch.optim.Optimizer) if issubclass(cls, one)), None)
            kinds[cls] = kind
        if kind is torch.Tensor:
            if _is_parameter(found, device_type):
                parameters[id(found)] = found
        elif kind is not None:
            optimizers.append(found)
    del found
    trained = [tensor for tensor in parameters.values() if tensor.requires_grad]
    learns = bool(optimizers) or torch.is_grad_enabled()
    states = [_state_bytes(one, device_type) for one in optimizers]
    return {
        "parameters": sum(map(_size, parameters.values())),
        "gradients": sum(map(_size, trained)) if learns else 0,
        "optimizer": None if None in states else sum(state or 0 for state in states),
    }


def _is_parameter(tensor: Any, device_type: str) -> bool:
    """Return whether it is a module's parameter or another trained leaf that takes memory on the device."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            if tensor.device.type != device_type or not is_leaf(tensor):
                return False
            return tensor.requires_grad or issubclass(type(tensor), torch.nn.Parameter)
        except (RuntimeError, ValueError, NotImplementedError):  # a lazy parameter, or no memory
            return False


def _size(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return rounded(tensor.numel() * tensor.element_size())
        except (RuntimeError, ValueError, NotImplementedError):
            return 0


def _state_bytes(optimizer: torch.optim.Optimizer, device_type: str) -> int | None:
    """Return the bytes of an optimizer's state: actual for updated parameters, predicted for others."""
    total, unknown = 0, False
    copies = next((COPIES[cls.__name__] for cls in type(optimizer).__mro__ if cls.__name__ in COPIES), None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not _is_parameter(parameter, device_type):
                continue
            state = optimizer.state.get(parameter)
            if state:
                total += sum(_size(tensor) for tensor in _tensors(state.values(), device_type))
            elif copies is not None:
                total += copies(group) * _size(parameter)
            elif parameter.requires_grad:
                unknown = True
    return None if unknown else total


def _tensors(values: Any, device_type: str) -> Iterator[torch.Tensor]:
    """Yield the tensors on the device in one parameter's state, including its lists (L-BFGS)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == device_type:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, device_type)
