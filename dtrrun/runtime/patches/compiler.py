"""Keeps `torch.compile` from compiling, and says so once.

Compiled code reads its inputs' memory without an operator that could bring it back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from dtrrun.runtime.patches.registry import Function, Patches, caller

TEXT = (
    "torch.compile compiles nothing under dtrrun: the function runs eagerly, with the same results but "
    "without the compiler's speed"
)

PYTORCHS_OWN = ("torch._higher_order_ops.", "torch.nn.attention.")
"""Modules that use `torch.compile` for tracing, not for speed."""


class CompileNotice:
    """Wraps `torch.compile` while installed. `warn` is called when a function made by it is called.

    A library that only decorates its functions on import, like transformers, causes no warning: they may
    never be called. Dynamo's contexts call the functions in their `enter_exit_hooks` at each call; in
    versions without such a list, the warning comes with the decoration.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._stance: Any = None  # Dynamo's, while it compiles nothing
        self._installed = False
        self._patches = Patches()
        self._watched = False  # Dynamo has been imported, and the creation of its contexts is patched
        self._own = threading.local()  # whether PyTorch itself calls `torch.compile`

    def install(self) -> None:
        self._installed = True
        self._patches.wrap(torch, "compile", self._compiling)

    def remove(self) -> None:
        self._installed = self._watched = False
        self._patches.undo()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _compiling(self, original: Function) -> Function:
        def compile(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("fullgraph"):  # it would raise, also in flex_attention, which sets it itself
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
        """Patch the creation of Dynamo's contexts.

        `torch.compile` imports Dynamo as well, which takes a second.
        """
        if not self._watched:
            self._watched = True
            self._stance = torch.compiler.set_stance("force_eager")
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
            elif isinstance(context, dynamo.eval_frame.OptimizeContext):  # otherwise compilation is disabled
                self._warn(TEXT)
            return context

        return optimize

    def _called(self) -> Callable[[], None]:
        """A function to be compiled is called. Returns a function to call when it has returned."""
        if self._installed:
            self._warn(TEXT)
        return _nothing


def _nothing() -> None:
    pass
