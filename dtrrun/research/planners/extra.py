"""numpy and scipy, which are installed only with the extra `planners`."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtra(ImportError):
    """A planner needs a package that is not installed; the text says how to get it."""


def numpy() -> Any:
    return _load("numpy")


def optimize() -> Any:
    return _load("scipy.optimize")


def sparse() -> Any:
    return _load("scipy.sparse")


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingExtra(f"this planner needs {package}: pip install scipy numpy") from error
