"""`torch.compile` compiles nothing under a dispatch mode, and says nothing: we say it once, where it matters.

And Dynamo, its front end, is told to keep off our own frames. PyTorch does so for every dispatch mode by
wrapping its handler, which costs a microsecond an operator whether anything is compiled or not; a mark at
the handler's code does the same for nothing. The mark is private to PyTorch: where it is missing, the
wrapper stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch._C._dynamo import eval_frame

from dtrrun.runtime.patches import Function, Patches, caller

CAN_MARK = all(
    hasattr(eval_frame, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)

TEXT = (
    "torch.compile compiles nothing under dtrrun: the function runs eagerly, with the same results but "
    "without the compiler's speed"
)

PYTORCHS_OWN = ("torch._higher_order_ops.", "torch.nn.attention.")
"""Modules that call `torch.compile` to trace a function, not for its speed."""


def keep_off(function: Any) -> None:
    """Dynamo shall compile neither `function` nor anything that it calls."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


class CompileNotice:
    """Wraps `torch.compile` while installed; `warn` is called when a function that it has made is called.

    A library that decorates functions of its own when it is imported, as transformers does, is no reason to
    speak: they may never be called. Dynamo's contexts call the functions in their `enter_exit_hooks` at each
    call; where a version has no such list, the warning comes with the decoration.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._installed = False
        self._patches = Patches()
        self._watched = False  # Dynamo has been imported, and what makes its contexts is replaced
        self._own = threading.local()  # whether PyTorch itself calls `torch.compile`

    def install(self) -> None:
        self._installed = True
        self._patches.wrap(torch, "compile", self._compiling)

    def remove(self) -> None:
        self._installed = self._watched = False
        self._patches.undo()

    def _compiling(self, original: Function) -> Function:
        def compile(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("fullgraph"):  # it would raise, in flex_attention too, which asks for it itself
                kwargs["fullgraph"] = False
            self._watch()
            if not caller().f_globals.get("__name__", "").startswith(PYTORCHS_OWN):
                return original(*args, **kwargs)
            self._own.calls = True
            try:
                return original(*args, **kwargs)
            finally:
                self._own.calls = False

        return compile

    def _watch(self) -> None:
        """Replace what makes Dynamo's contexts. `torch.compile` imports it, too, which takes a second."""
        if not self._watched:
            self._watched = True
            self._patches.wrap(import_module("torch._dynamo"), "optimize", self._optimizing)

    def _optimizing(self, original: Function) -> Function:
        dynamo: Any = import_module("torch._dynamo")

        def optimize(*args: Any, **kwargs: Any) -> Any:
            context = original(*args, **kwargs)
            hooks = getattr(context, "enter_exit_hooks", None)
            if getattr(self._own, "calls", False):
                pass
            elif hooks is not None:
                hooks.append(self._called)
            elif isinstance(context, dynamo.eval_frame.OptimizeContext):  # else compilation is switched off
                self._warn(TEXT)
            return context

        return optimize

    def _called(self) -> Callable[[], None]:
        """A function that was to be compiled is called; returns what is to be done when it has returned."""
        if self._installed:
            self._warn(TEXT)
        return _nothing


def _nothing() -> None:
    pass
