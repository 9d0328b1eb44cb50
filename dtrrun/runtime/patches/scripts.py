"""Makes TorchScript see the program's frames, and hides from the program's function modes what it runs.

The program's function modes see nothing of what compiled code does, and must not see how we inspect its
tensors. The tracer names a tensor after the variable that holds it in the innermost frame, which may be one
of ours.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.jit

from dtrrun.runtime.patches.registry import Function, Patches

_C: Any = torch._C
_OURS = "dtrrun.runtime."


class Scripts:
    """Patches calls of compiled functions, and the tracer, while installed."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self) -> None:
        self._patches.wrap(_C.ScriptFunction, "__call__", _calling)
        self._patches.wrap(_C.ScriptMethod, "__call__", _calling)
        self._patches.wrap(torch.jit._trace, "_create_interpreter_name_lookup_fn", _naming)

    def remove(self) -> None:
        self._patches.undo()


def _calling(original: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _C._len_torch_function_stack():
            return original(*args, **kwargs)
        with _C.DisableTorchFunction():
            return original(*args, **kwargs)

    return call


def _naming(original: Function) -> Function:
    def create(frames_up: int = 1) -> Function:
        def name_of(tensor: torch.Tensor) -> Any:
            ours, frame = 0, sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
                ours, frame = ours + 1, frame.f_back
            return original(frames_up + 1 + ours)(tensor)

        return name_of

    return create
