"""Calls a function soon, between two instructions of Python code: not within an operator that asks for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

_KIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_waiting: list[Callable[[], None]] = []


def soon(function: Callable[[], None]) -> None:
    """Call a function in the main thread, once that runs Python code. Several requests in between are one."""
    if function not in _waiting:
        _waiting.append(function)
        if ctypes.pythonapi.Py_AddPendingCall(_call, None) != 0:  # too many are pending
            _waiting.remove(function)


def _call_all(_: object) -> int:
    while _waiting:
        with suppress(Exception):  # nobody could catch it
            _waiting.pop()()
    return 0


_call = _KIND(_call_all)  # the interpreter has its address
