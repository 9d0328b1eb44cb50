"""`--compile eager`: nothing is compiled, and what would be compiled runs eagerly."""

from __future__ import annotations

import sys
from typing import Any

import torch

from dtrrun.runtime.patches.registry import Function, Patches


class Eagerly:
    """Keeps `torch.compile` from compiling while installed."""

    kernels = graphs = opaque = 0
    """As in `Compiler`."""

    def __init__(self) -> None:
        self._stance: Any = None  # Dynamo's, while it compiles nothing
        self._patches = Patches()

    def install(self) -> None:
        self._patches.wrap(torch, "compile", self._compiling)
        if "torch._dynamo" in sys.modules:  # something may have been compiled already
            self._compile_nothing()

    def remove(self) -> None:
        self._patches.undo()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _compiling(self, original: Function) -> Function:
        def compile(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("fullgraph"):  # it would raise, even in flex_attention, which sets it itself
                kwargs["fullgraph"] = False
            self._compile_nothing()  # only now: it imports Dynamo, as `torch.compile` does: a second
            return original(*args, **kwargs)

        return compile

    def _compile_nothing(self) -> None:
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
