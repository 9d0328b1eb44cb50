"""The training state at the end of each step, as digests for comparing two runs.

It consists of parameters, buffers, and the state of optimizers and of PyTorch's random generators. Modules
are found among Python's objects, since a script does not declare its model: those with a parameter of an
optimizer come first, in the optimizers' order, so that two runs of a script give them the same names.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtrrun.runtime.guards import below
from dtrrun.runtime.observe.steps import is_inner
from dtrrun.runtime.storage import storage_of
from dtrrun.telemetry.state import write_state

Hold = Callable[[list[torch.Tensor]], Callable[[], None]]
"""Brings tensors into memory, until the returned function is called."""


class TrainingState:
    """Writes a `telemetry.state` into a folder after each optimizer step."""

    def __init__(self, folder: str, hold: Hold = lambda tensors: lambda: None) -> None:
        self._folder = folder
        self._hold = hold
        self._optimizers: list[torch.optim.Optimizer] = []
        self._steps = 0

    def install(self) -> None:
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def remove(self) -> None:
        self._handle.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # nothing has run yet, and reading memory would break the CUDA graph's capture
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        if is_inner():
            return
        self._steps += 1
        with (guard := below()), guard:
            digests = {name: self._digest(value) for name, value in self._named()}
        write_state(self._folder, os.getpid(), {"step": self._steps, "digests": digests})

    def _digest(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return digest(value)
        let_go = self._hold([value])
        try:
            return digest(value)
        finally:
            let_go()

    def _named(self) -> Iterator[tuple[str, Any]]:
        names: dict[int, str] = {}
        for module_name, module in self._modules():
            for kind in (module.named_parameters, module.named_buffers):
                for name, tensor in kind():
                    names.setdefault(id(tensor), f"{module_name}.{name}")
                    yield f"{module_name}.{name}", tensor
        for place, optimizer in enumerate(self._optimizers):
            title = f"{type(optimizer).__name__} {place}"
            for number, parameter in enumerate(_parameters(optimizer)):
                name = names.get(id(parameter), f"parameter {number}")
                if id(parameter) not in names:
                    yield f"{title}, {name}", parameter
                state = optimizer.state.get(parameter, {})
                for key, value in sorted(state.items(), key=lambda item: str(item[0])):
                    yield f"{title}, {key} of {name}", value
        yield "random generator", torch.get_rng_state()
        if torch.cuda.is_initialized():
            for index, state in enumerate(torch.cuda.get_rng_state_all()):
                yield f"random generator of cuda:{index}", state

    def _modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Return the top-level modules, with names.

        Those of the same class that are in no optimizer are ordered by content, which has no further meaning.
        """
        # type(), because isinstance() would ask lazy proxies among all objects for their __class__.
        found = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
        inner = {id(part) for one in found for part in list(one.modules())[1:]}
        order = {
            id(parameter): place
            for place, parameter in enumerate(p for o in self._optimizers for p in _parameters(o))
        }
        ranked = []
        for one in found:
            if id(one) not in inner:
                rank = min((order[id(p)] for p in one.parameters() if id(p) in order), default=len(order))
                content = [self._digest(t) for t in one.parameters()] if rank == len(order) else []
                ranked.append((rank, type(one).__name__, content, one))
        ranked.sort(key=lambda entry: entry[:3])
        names: dict[str, int] = {}
        result = []
        for _, name, _, one in ranked:
            names[name] = count = names.get(name, 0) + 1
            result.append((name if count == 1 else f"{name} {count}", one))
        return result


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def digest(value: Any) -> str:
    """Return a digest of a tensor's type, shape and bits, or of another value's repr."""
    if not isinstance(value, torch.Tensor):
        return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
    value = getattr(value, "_local_tensor", value).detach()  # the local part of a DTensor
    found = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=16)
    if value.device.type != "meta" and value.layout == torch.strided:
        whole = value.cpu().contiguous()
        nbytes = whole.numel() * whole.element_size()
        start = storage_of(whole).data_ptr() + whole.storage_offset() * whole.element_size()
        if nbytes:
            found.update((ctypes.c_char * nbytes).from_address(start))
    return found.hexdigest()
