"""What we run for ourselves gives no warnings: the program has had its operators' own when it ran them.

A warning of one of PyTorch's kernels waits until the call that Python made into PyTorch returns, and goes
through Python's `warnings` then. Around a replay that call is the program's. So a replay is put into a call
of its own, and warnings are filtered while it lasts, in this thread alone. `warnings.catch_warnings` would
filter those of all threads, and make Python forget which warnings the program has been given already.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_call: Any = torch._C._disabled_torch_function_impl
"""Calls a function from C++, as `PyWarningHandler` of torch/csrc/Exceptions.h surrounds all such calls."""


class _Silent(threading.local):
    """In a filter, in place of a pattern for the text: matches all warnings of threads that are silent."""

    depth = 0

    def match(self, _text: str) -> bool:
        return self.depth > 0


_silent = _Silent()
_FILTER = ("ignore", _silent, Warning, None, 0)


def silently(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`; returns what it returns, raises what it raises."""
    results: list[Any] = []

    def run() -> BaseException | None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as error:  # what C++ has in hand when it comes to the warnings is no exception
            return error
        return None

    filters: Any = warnings.filters
    filters.insert(0, _FILTER)
    _silent.depth += 1
    try:
        error = _call(run, (), (), {})
    finally:
        _silent.depth -= 1
        with suppress(ValueError):  # the program has emptied the list
            filters.remove(_FILTER)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    return results.pop()
