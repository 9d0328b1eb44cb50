"""Removes dtrrun's frames from the tracebacks that the program sees, as Python does with importlib's.

An operator's error, or a budget error, passes through our handler on its way to the program. Without dtrrun
the traceback would end at the program's line, or in the PyTorch function that it calls. So each of our
functions that PyTorch or the program calls hides our frames when an error passes. A frame's entry is made
when the error reaches the frame, and a bare `raise` makes no new one. Tracebacks printed by a hook are
filtered once more, for errors that took another route.

Errors caused by defects in our own code keep all of their frames, as does every error while DTRRUN_DEBUG is
set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_BOOT = os.path.join(PACKAGE, "boot", "")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
BETWEEN = tuple(os.path.join(_TORCH, *name.split("/")) for name in ("_ops.py", "utils/_python_dispatch.py"))
"""PyTorch files whose frames, if they directly follow ours, belong to a call that we made."""

MISTAKES = (AssertionError, AttributeError, KeyError, NameError, RecursionError)
"""Errors that PyTorch's kernels do not raise: from our code, they are bugs to be reported."""


def hide(error: BaseException) -> None:
    """Remove our frames from the traceback of `error`, and from those of the errors in its context chain.

    Errors that we caught ourselves (a budget error followed by another attempt) are removed completely.
    """
    if os.environ.get("DTRRUN_DEBUG"):
        return
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if not _is_mistake(current):
            current.__traceback__ = _cut(current.__traceback__)
        context = current.__context__
        while context is not None and id(context) not in seen and _was_caught_by_us(context):
            seen.add(id(context))
            context = context.__context__
        if context is not current.__context__:
            current.__context__ = context
        current = context


def hiding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of the function that hides our frames when an error leaves it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            hide(error)
            raise

    return call


def is_beneath_us() -> bool:
    """Return whether the code that was interrupted has been called by ours. Called from a pending call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.startswith(_BOOT):
            return True
        frame = frame.f_back
    return False


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _cut(entry: TracebackType | None) -> TracebackType | None:
    """Return the traceback without our frames, and without the PyTorch frames that they called."""
    first = last = None
    after_ours = False
    while entry is not None:
        if _is_ours(entry):
            after_ours = True
        elif not (after_ours and entry.tb_frame.f_code.co_filename in BETWEEN):
            after_ours = False
            if last is None:
                first = entry
            else:
                last.tb_next = entry
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
    return first


def _is_mistake(error: BaseException) -> bool:
    entry = error.__traceback__
    if entry is None or not isinstance(error, MISTAKES):
        return False
    while entry.tb_next is not None:
        entry = entry.tb_next
    return _is_ours(entry)


def _was_caught_by_us(error: BaseException) -> bool:
    """Return whether we caught this error: a traceback begins with the frame that caught it."""
    return error.__traceback__ is not None and _is_ours(error.__traceback__)
