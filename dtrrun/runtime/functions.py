"""Custom `autograd.Function`s may hand their tensors to native code that no operator shows.

So the inputs stay in memory for the length of the forward, and what `ctx.saved_tensors` returns for the
length of the backward. `Function.apply` and the class that PyTorch derives each backward node from are the
only places to learn of both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from dtrrun.runtime.tracebacks import hide

Locker = Callable[[list[torch.Tensor]], Callable[[], None]]
"""Locks the storages of tensors in memory; returns what unlocks them."""


class Functions:
    """Patches custom functions while installed."""

    def __init__(self, lock: Locker) -> None:
        self._lock = lock
        self._frames = threading.local()

    def install(self) -> None:
        lock, frames = self._lock, self._frames
        self._forward = forward = torch.autograd.Function.__dict__["apply"]
        self._backward = backward = BackwardCFunction.__dict__["apply"]
        saved: Any = BackwardCFunction.saved_tensors

        def apply_forward(cls: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                unlock = lock([arg for arg in args if isinstance(arg, torch.Tensor)])
                try:
                    return forward.__get__(None, cls)(*args, **kwargs)
                finally:
                    unlock()
            except BaseException as error:
                hide(error)
                raise

        def apply_backward(node: Any, *args: Any) -> Any:
            outer = getattr(frames, "unlocks", None)
            try:
                frames.unlocks = [lock([arg for arg in args if isinstance(arg, torch.Tensor)])]
                try:
                    return backward(node, *args)
                finally:
                    for unlock in frames.unlocks:
                        unlock()
                    frames.unlocks = outer
            except BaseException as error:
                hide(error)
                raise

        def saved_tensors(node: Any) -> Any:
            tensors = saved.__get__(node)
            unlocks = getattr(frames, "unlocks", None)
            if unlocks is not None:
                try:
                    unlocks.append(lock([tensor for tensor in tensors if tensor is not None]))
                except BaseException as error:
                    hide(error)
                    raise
            return tensors

        torch.autograd.Function.apply = classmethod(apply_forward)  # type: ignore[assignment,method-assign]
        BackwardCFunction.apply = apply_backward  # type: ignore[method-assign]
        BackwardCFunction.saved_tensors = property(saved_tensors)  # type: ignore[assignment]

    def remove(self) -> None:
        torch.autograd.Function.apply = self._forward  # type: ignore[method-assign]
        BackwardCFunction.apply = self._backward  # type: ignore[method-assign]
        del BackwardCFunction.saved_tensors
