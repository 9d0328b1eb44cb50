"""Watches functions of native extensions that Python calls directly, such as those made by pybind11.

No operator shows what they do. They read and write tensors by address, before, between and after the
operators that they call, as composite operators of native libraries do, and are handled in the same way
(`foreign_composites.py`).
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any

from dtrrun.runtime.patches.foreign_composites import ForeignComposites
from dtrrun.runtime.patches.registry import Function, Patches
from dtrrun.runtime.tracebacks import hiding


class ExtensionFunctions:
    """The functions watched by one session."""

    def __init__(self, native: ModuleType, composites: ForeignComposites) -> None:
        """native: our own extension. composites: what handles calls of the functions."""
        self._native, self._composites = native, composites
        self._patches = Patches()

    def install(self) -> None:
        self._native.watch_functions(hiding(self._composites.call))
        if paths := set(self._native.foreign_paths()):
            self._native.meet_functions(gc.get_objects())  # not those that `gc.freeze` has hidden
            for module in list(sys.modules.values()):  # modules need not be listed there
                if getattr(module, "__file__", None) in paths:
                    self._native.meet_functions(functions_of(module))
        self._patches.wrap(ExtensionFileLoader, "exec_module", self._loading)

    def remove(self) -> None:
        self._patches.undo()
        self._native.watch_functions(None)

    def _loading(self, original: Function) -> Function:
        def exec_module(loader: Any, module: ModuleType) -> None:
            original(loader, module)
            if loader.path in self._native.foreign_paths():
                self._native.meet_functions(functions_of(module))

        return exec_module


def functions_of(module: ModuleType) -> list[Any]:
    """Return the built-in functions, among others, of a module, its submodules and their classes."""
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[Any] = [module]
    while pending:
        owner = pending.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for value in [*vars(owner).values()]:
            if isinstance(value, type) or (isinstance(value, ModuleType) and _is_within(value, module)):
                pending.append(value)
            elif isinstance(value, property):
                found += [value.fget, value.fset, value.fdel]
            else:
                found.append(getattr(value, "__func__", value))  # of a method, bound or not
    return found


def _is_within(module: ModuleType, outer: ModuleType) -> bool:
    return module.__name__.startswith(f"{outer.__name__}.")
