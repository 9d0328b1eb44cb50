"""Calls back when the program has imported a module that we patch, and do not import ourselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def after_import(name: str, action: Action) -> Callable[[], None]:
    """Call `action(module)` when the module has been imported: now, or once the program has imported it.

    Returns a function that takes this back.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder:
    """Finds nothing itself: it asks the finders behind it, and calls back when their loader is done."""

    def __init__(self, name: str, action: Action) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        found = [*sys.meta_path]
        for finder in found[found.index(self) + 1 :] if self in found else ():
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None:
                    self._call_after(spec.loader)
                return spec
        return None

    def _call_after(self, loader: Any) -> None:
        exec_module = loader.exec_module

        def exec_and_call(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            exec_module(module)
            if self in sys.meta_path:
                self.remove()
                self._action(module)

        loader.exec_module = exec_and_call

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
