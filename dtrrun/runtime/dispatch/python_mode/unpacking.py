"""The program's hooks on saved tensors, and how to inspect saved tensors without calling them.

`saved_tensors_hooks` and `SavedTensor.register_hooks` let a program decide how a tensor is kept between
forward and backward. Its unpack hook must run once for each use, and with our mode on: it may read evicted
tensors, as the recomputation of `torch.utils.checkpoint` does. Nodes for which our mode is off
(`mode_checks`) call it from C++, so it is wrapped in a function that can restore the mode. No longer needed
once those nodes work with the mode on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_autograd: Any = torch._C._autograd
SavedTensor: Any = _autograd.SavedTensor

_asking = threading.local()


class Hooked(Exception):
    """The saved tensor has an unpack hook of the program."""


class Unpacking:
    """While installed, calls `run` instead of the program's unpack hooks, with the hook and its argument."""

    def __init__(self, run: Callable[[Any, Any], Any]) -> None:
        self._run = run

    def install(self) -> None:
        self._push = push = _autograd._push_saved_tensors_default_hooks
        self._register = register = SavedTensor.register_hooks
        seen = self._seen

        @functools.wraps(push)
        def push_hooks(pack: Any, unpack: Any) -> Any:
            return push(pack, seen(unpack))

        @functools.wraps(register)
        def register_hooks(saved: Any, pack: Any, unpack: Any) -> Any:
            return register(saved, pack, seen(unpack))

        _autograd._push_saved_tensors_default_hooks = push_hooks
        SavedTensor.register_hooks = register_hooks
        self._stand_before_those_entered()

    def remove(self) -> None:
        _autograd._push_saved_tensors_default_hooks = self._push
        SavedTensor.register_hooks = self._register

    def _stand_before_those_entered(self) -> None:
        top = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
        entered = []
        while top is not None and (hooks := top(True)) is not None:
            entered.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
        for pack, unpack in reversed(entered):
            self._push(pack, self._seen(unpack))

    def _seen(self, hook: Any) -> Any:
        if not callable(hook):
            return hook  # PyTorch raises the error
        run = self._run

        @functools.wraps(hook, updated=())
        def unpack(packed: Any) -> Any:
            if getattr(_asking, "now", False):
                raise Hooked
            return run(hook, packed)

        return unpack


def saved_by(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node has saved without hooks; others are not available before their hooks run.

    Yields nothing for tensors that were freed, or written to since: the node will raise.
    """
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        saved = getattr(node, "_raw" + name, None)
        if getattr(saved, "unpack_hook", None) is not None:  # PyTorch 2.13; hooks may predate the session
            continue
        _asking.now = True
        try:
            value = getattr(node, name)
        except (Hooked, RuntimeError):
            continue
        finally:
            _asking.now = False
        if isinstance(value, torch.Tensor):
            yield value
