"""Suppresses warnings of operators that dtrrun runs, since the program got them in the first run.

A warning of a PyTorch kernel is delayed until the call from Python into PyTorch returns, and then passed to
Python's `warnings`. During a replay that call is the program's. So a replay is wrapped in a call of its own,
and warnings are filtered meanwhile, in this thread alone. `warnings.catch_warnings` would filter those of all
threads, and make Python forget which warnings it has already shown.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_call: Any = torch._C._disabled_torch_function_impl
"""Calls a function from C++, inside a `PyWarningHandler` (torch/csrc/Exceptions.h) as all such calls."""


class _Silent(threading.local):
    """Used in a filter instead of a pattern for the text. Matches all warnings of silent threads."""

    depth = 0

    def match(self, _text: str) -> bool:
        return self.depth > 0


_silent = _Silent()
_FILTER = ("ignore", _silent, Warning, None, 0)


def silently(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` and return its result, or raise its error."""
    results: list[Any] = []

    def run() -> BaseException | None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as error:  # C++ must not have an error set when it handles warnings
            return error
        return None

    filters: Any = warnings.filters
    filters.insert(0, _FILTER)
    _silent.depth += 1
    try:
        error = _call(run, (), (), {})
    finally:
        _silent.depth -= 1
        with suppress(ValueError):  # the program has cleared the list
            filters.remove(_FILTER)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    return results.pop()
