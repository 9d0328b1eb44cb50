"""The memory that training needs regardless of budget: parameters, gradients and optimizer state.

Computed once, when a budget is too small, so nothing has to be tracked for it: parameters and optimizers are
found among Python's objects, even if they predate the session.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch

from dtrrun.runtime.dispatch.arguments import is_leaf
from dtrrun.runtime.storage import instances, rounded, storage_of

SHAPES = "torch._subclasses."
"""Where PyTorch defines tensors without memory, such as FakeTensor."""
OPTIMIZER = torch.optim.Optimizer.__module__
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
    "Adafactor": lambda group: 0,  # only a row and a column per matrix
}
"""How many tensors of a parameter's size PyTorch's optimizers keep, by class and options."""
PARAMETER, GRADIENT, OPTIMIZER_STATE, BUFFER = "parameter", "gradient", "optimizer state", "buffer"
"""What storages may be for a program."""
KINDS = torch.Tensor, torch.optim.Optimizer, torch.nn.Module


class Training(NamedTuple):
    """What a program trains with, found among Python's objects."""

    parameters: list[torch.Tensor]
    optimizers: list[torch.optim.Optimizer]
    learns: bool  # whether gradients are to be expected
    device: str  # a type, or one of several GPUs (`cuda:1`)
    buffers: Sequence[torch.Tensor] = ()

    def present(self, key_of: Callable[[Any], int]) -> dict[int, int]:
        """Return the bytes of parameters, gradients and optimizer state that exist, by storage.

        key_of: returns a storage's key in the result.
        """
        tensors = [*self.parameters]
        tensors += [one for parameter in self.parameters if (one := _gradient(parameter)) is not None]
        for optimizer in self.optimizers:
            for _, parameter in self._updated(optimizer):
                tensors += _tensors(_state(optimizer, parameter).values(), self.device)
        return by_storage(tensors, key_of)

    def roles(self, key_of: Callable[[Any], int]) -> dict[int, str]:
        """Return what storages are for the program, by key: of those that belong to its training."""
        gradients = [one for parameter in self.parameters if (one := _gradient(parameter)) is not None]
        found: dict[int, str] = {}
        for role, tensors in (
            (BUFFER, self.buffers),
            (OPTIMIZER_STATE, states_of(self.optimizers)),
            (GRADIENT, gradients),
            (PARAMETER, self.parameters),  # last, because a parameter may also be one of the others
        ):
            found |= dict.fromkeys(by_storage(tensors, key_of), role)
        return found

    def has_gradients(self) -> bool:
        return any(_gradient(one) is not None for one in self.parameters)

    def trained(self, key_of: Callable[[Any], int]) -> dict[int, int]:
        """Return the bytes of the parameters that may get a gradient, by storage."""
        return by_storage(self._trained(), key_of)

    def without_gradient(self, key_of: Callable[[Any], int]) -> dict[int, int]:
        """Return the bytes of the parameters that may get a gradient but have none, by storage."""
        return by_storage((one for one in self._trained() if _gradient(one) is None), key_of)

    def to_come_bytes(self, key_of: Callable[[Any], int] = id, reached: set[int] | None = None) -> int:
        """Return the bytes of gradients and of known optimizer state that are not yet allocated.

        reached: the storages of the parameters that the current backward pass reaches, if there is one.
        """
        learning = {id(one) for one in self._learning(key_of, reached)}
        total = sum(_size(one) for one in self._trained() if id(one) in learning and _gradient(one) is None)
        return total + self._state_to_come_bytes(learning)

    def state_to_come_bytes(self, key_of: Callable[[Any], int] = id, reached: set[int] | None = None) -> int:
        """Return the part of `to_come_bytes` that is optimizer state."""
        return self._state_to_come_bytes({id(one) for one in self._learning(key_of, reached)})

    def _state_to_come_bytes(self, learning: set[int]) -> int:
        total = 0
        for optimizer in self.optimizers:
            for group, parameter in self._updated(optimizer):
                if id(parameter) in learning and not _state(optimizer, parameter):
                    total += (_copies(optimizer, group) or 0) * _size(parameter)
        return total

    def _learning(self, key_of: Callable[[Any], int], reached: set[int] | None) -> Iterator[torch.Tensor]:
        """Yield the parameters that have gradients, or may get them, as far as that is known.

        If there are optimizers, a parameter that none of them has gets no gradient. Nor does one that the
        current backward pass does not reach, unless it has had one before.
        """
        if not self.learns:
            return
        given = {id(one) for optimizer in self.optimizers for _, one in self._updated(optimizer)}
        updated = {id(one) for optimizer in self.optimizers for one in optimizer.state}
        for one in self._trained():
            passed = reached is None or not reached.isdisjoint(by_storage((one,), key_of))
            may = passed and (not given or id(one) in given)
            if may or _gradient(one) is not None or id(one) in updated:
                yield one

    def update_bytes(self) -> int:
        """Return the approximate temporary memory of an optimizer's step.

        PyTorch's optimizers compute a denominator and a decayed gradient, for one parameter at a time or for
        all of a group at once.
        """
        most = 0
        for optimizer in self.optimizers:
            sizes: dict[bool, list[int]] = {False: [], True: []}
            for group, parameter in self._updated(optimizer):
                if not group.get("fused"):
                    at_once = group.get("foreach")
                    at_once = self.device.startswith("cuda") if at_once is None else at_once
                    sizes[bool(at_once)].append(_size(parameter))
            most = max(most, sum(sizes[True]), *sizes[False])
        return 2 * most

    def totals(self) -> dict[str, int | None]:
        """Return the bytes of `parameters`, `gradients` and `optimizer`, including those not yet allocated.

        `optimizer` is None if an optimizer has not stepped and is of an unknown class.
        """
        states = [self._state_bytes(one) for one in self.optimizers]
        return {
            "parameters": sum(map(_size, self.parameters)),
            "gradients": sum(map(_size, self._trained())) if self.learns else 0,
            "optimizer": None if None in states else sum(state or 0 for state in states),
        }

    def _trained(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.parameters if tensor.requires_grad]

    def _updated(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if _is_parameter(parameter, self.device):
                    yield group, parameter

    def _state_bytes(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the bytes of an optimizer's state: actual for updated parameters, predicted for others."""
        total, unknown = 0, False
        for group, parameter in self._updated(optimizer):
            state, copies = _state(optimizer, parameter), _copies(optimizer, group)
            if state:
                total += sum(_size(tensor) for tensor in _tensors(state.values(), self.device))
            elif copies is not None:
                total += copies * _size(parameter)
            elif parameter.requires_grad:
                unknown = True
        return None if unknown else total


def find_training(device: str, tensors: list[torch.Tensor] | None = None) -> Training:
    """Find the parameters and optimizers of the program.

    Gradients are those of all parameters that require them; none are assumed in a program that has no
    optimizer and computes without gradients. tensors: gets those with a graph of autograd.
    """
    parameters: dict[int, torch.Tensor] = {}
    optimizers: list[torch.optim.Optimizer] = []
    buffers: list[torch.Tensor] = []
    for found in instances(gc.get_objects(), KINDS):
        cls = type(found)
        if issubclass(cls, torch.Tensor):
            if tensors is not None and has_graph(found):
                tensors.append(found)
            if _is_parameter(found, device):
                parameters[id(found)] = found
        elif issubclass(cls, torch.optim.Optimizer):
            optimizers.append(found)
        else:
            buffers += _tensors((found.__dict__.get("_buffers") or {}).values(), device)
    learns = bool(optimizers) or torch.is_grad_enabled() or in_backward()
    return Training([*parameters.values()], optimizers, learns, device, buffers)


def training_of(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module], device: str
) -> Training:
    """Return what these optimizers and modules train, without a search of the program's objects."""
    optimizers = list(optimizers)
    parts = [part for module in modules for part in module.modules()]
    given = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    given += [one for part in parts for one in part._parameters.values()]
    parameters = {id(one): one for one in given if one is not None and _is_parameter(one, device)}
    buffers = [one for part in parts for one in _tensors(part._buffers.values(), device)]
    return Training([*parameters.values()], optimizers, True, device, buffers)


def has_graph(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.requires_grad and not tensor.is_leaf
        except (RuntimeError, ValueError, NotImplementedError, AttributeError):
            return False


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Yield all tensors that optimizers hold, except the parameters that they update."""
    for optimizer in optimizers:
        attributes = dict(vars(optimizer))
        groups = attributes.pop("param_groups", ())
        attributes.pop("defaults", None)
        updated = {id(one) for group in groups for one in group["params"]}
        pending: list[Any] = [*attributes.values()]
        pending += [value for group in groups for name, value in group.items() if name != "params"]
        while pending:
            value = pending.pop()
            cls = type(value)
            if issubclass(cls, torch.Tensor):
                if id(value) not in updated:
                    yield value
            elif issubclass(cls, dict):
                pending += dict.values(value)
            elif cls in (list, tuple):
                pending += value


class Phase(NamedTuple):
    """What a thread is doing: a backward pass, an optimizer's step, or something that records gradients."""

    backward: bool
    optimizer: bool
    gradients: bool


_earlier: ContextVar[Phase | None] = ContextVar("dtrrun_phase", default=None)


def phase() -> Phase:
    return Phase(in_backward(), in_optimizer(), torch.is_grad_enabled())


@contextmanager
def as_in(earlier: Phase) -> Iterator[None]:
    """Context: for the functions below, and for gradients, this thread is in that phase."""
    token = _earlier.set(earlier)
    try:
        with torch.set_grad_enabled(earlier.gradients):
            yield
    finally:
        _earlier.reset(token)


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    earlier = _earlier.get()
    return torch._C._current_graph_task_id() != -1 if earlier is None else earlier.backward


def in_optimizer() -> bool:
    """Return whether this thread is in an optimizer's step, which PyTorch wraps for its hooks."""
    if (earlier := _earlier.get()) is not None:
        return earlier.optimizer
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != OPTIMIZER:
        frame = frame.f_back  # not its `f_locals`, which would keep the program's tensors alive
    return frame is not None


def _copies(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int | None:
    for cls in type(optimizer).__mro__:
        if cls.__name__ in COPIES:
            return COPIES[cls.__name__](group)
    return None


def _state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[Any, Any]:
    """Return an optimizer's state for a parameter, which may also be a single tensor and no dict."""
    state = optimizer.state.get(parameter, {})
    return state if isinstance(state, dict) else {"": state}


def _is_on(tensor: torch.Tensor, device: str) -> bool:
    return tensor.device.type == device or str(tensor.device) == device


def _is_parameter(tensor: Any, device: str) -> bool:
    """Return whether a tensor is a module's parameter or another trained leaf with memory on the device."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            if not _is_on(tensor, device) or not is_leaf(tensor) or not _parts(tensor):
                return False
            _ = tensor.shape  # a lazy parameter and some nested tensors have none
            return tensor.requires_grad or issubclass(type(tensor), torch.nn.Parameter)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError):
            return False


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the memory of a tensor: itself, or what a subclass wraps.

    A compiler's stand-ins, which have shapes only, hold none.
    """
    kind = type(tensor)
    if kind.__module__.startswith(SHAPES):
        return []
    if not hasattr(kind, "__tensor_flatten__"):
        return [] if _is_freed(tensor) else [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = (getattr(tensor, name) for name in names)  # also what is no tensor: the mesh of a DTensor
    return [part for one in inner if isinstance(one, torch.Tensor) for part in _parts(one)]


def _is_freed(tensor: torch.Tensor) -> bool:
    """Return whether the program has emptied a tensor's storage, as FSDP does with gathered weights."""
    try:
        return bool(tensor.numel()) and storage_of(tensor).nbytes() == 0
    except (RuntimeError, ValueError, NotImplementedError):  # no plain storage, or no size
        return False


def by_storage(tensors: Iterable[torch.Tensor], key_of: Callable[[Any], int]) -> dict[int, int]:
    """Return the bytes of tensors, by the keys of their storages."""
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for part in (part for tensor in tensors for part in _parts(tensor)):
            with suppress(RuntimeError, NotImplementedError):  # it has no plain storage
                found[key_of(storage_of(part))] = _bytes(part)
    return found


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def _size(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return sum(map(_bytes, _parts(tensor)))


def _bytes(part: torch.Tensor) -> int:
    try:
        return rounded(part.numel() * part.element_size())
    except (RuntimeError, ValueError, NotImplementedError):
        return 0


def _tensors(values: Any, device: str) -> Iterator[torch.Tensor]:
    """Yield the tensors on the device in one parameter's state, including its lists (L-BFGS)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if _is_on(value, device):
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, device)
