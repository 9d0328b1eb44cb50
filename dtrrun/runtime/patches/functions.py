"""Keeps the tensors of a custom `autograd.Function` in memory while it runs.

It may pass them to native code that is not an operator. So its inputs stay in memory during the forward pass,
and the result of `ctx.saved_tensors` during the backward pass. `Function.apply` and the class from which
PyTorch derives each backward node are the only places to observe both.

The functions that PyTorch's compiler makes do not count as custom: what they call are operators (`compiled`).
What a compiled model saves need not fit into the budget at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from dtrrun.runtime.patches.registry import Function, Patches

_COMPILED = "torch._functorch._aot_autograd."
"""The package in which the compiler makes its functions."""

Locker = Callable[[list[torch.Tensor]], Callable[[], None]]
"""Locks the storages of tensors in memory. Returns a function that unlocks them."""


class Functions:
    """Patches custom functions while installed."""

    def __init__(self, lock: Locker) -> None:
        self._lock = lock
        self._frames = threading.local()
        self._patches = Patches()

    def install(self) -> None:
        lock, frames = self._lock, self._frames

        def forward(original: Function) -> Function:
            def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
                if cls.__module__.startswith(_COMPILED):
                    return original(cls, *args, **kwargs)
                unlock = lock([arg for arg in args if isinstance(arg, torch.Tensor)])
                try:
                    return original(cls, *args, **kwargs)
                finally:
                    unlock()

            return apply

        def backward(original: Function) -> Function:
            def apply(node: Any, *args: Any) -> Any:
                outer = getattr(frames, "unlocks", None)
                own: list[Callable[[], None]] | None = None
                if not type(node)._forward_cls.__module__.startswith(_COMPILED):
                    gradients = args[0] if len(args) == 1 and isinstance(args[0], list) else args
                    own = [lock([one for one in gradients if isinstance(one, torch.Tensor)])]
                frames.unlocks = own
                try:
                    return original(node, *args)
                finally:
                    frames.unlocks = outer
                    for unlock in own or ():
                        unlock()

            return apply

        def saved(original: Function) -> Function:
            def saved_tensors(node: Any) -> Any:
                tensors = original(node)
                unlocks = getattr(frames, "unlocks", None)
                if unlocks is not None:
                    unlocks.append(lock([tensor for tensor in tensors if tensor is not None]))
                return tensors

            return saved_tensors

        self._patches.wrap(torch.autograd.Function, "apply", forward)
        self._patches.wrap(BackwardCFunction, "apply", backward)
        self._patches.wrap(BackwardCFunction, "apply_boxed", backward, optional=True)  # since 2.15
        self._patches.wrap(BackwardCFunction, "saved_tensors", saved)

    def remove(self) -> None:
        self._patches.undo()
