"""Functions of native extensions that Python calls directly, as those that pybind11 makes.

No operator tells of them. They read and write tensors by address, before, between and after the operators
that they call, as composite operators of native libraries do, and so the same is done about them
(`foreign_composites.py`).
"""

from __future__ import annotations

import gc
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any

from dtrrun.runtime.patches.foreign_composites import ForeignComposites
from dtrrun.runtime.patches.registry import Function, Patches
from dtrrun.runtime.tracebacks import hiding


class ExtensionFunctions:
    """Those of one session."""

    def __init__(self, native: ModuleType, composites: ForeignComposites) -> None:
        """native: our own extension. composites: what is done about the functions."""
        self._native, self._composites = native, composites
        self._patches = Patches()

    def install(self) -> None:
        self._native.watch_functions(hiding(self._composites.call))
        self._native.look_for_functions(gc.get_objects)
        self._patches.wrap(ExtensionFileLoader, "exec_module", self._loading)

    def remove(self) -> None:
        self._patches.undo()
        self._native.watch_functions(None)

    def _loading(self, original: Function) -> Function:
        def exec_module(loader: Any, module: ModuleType) -> None:
            original(loader, module)
            self._native.look_for_functions(gc.get_objects, loader.path)

        return exec_module
