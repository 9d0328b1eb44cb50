"""Notices tensors that DLPack's C exchange exports.

`Tensor.__dlpack_c_exchange_api__` is a table of C functions. Consumers find the table once and keep it, or
its functions, for the life of the process. So functions in PyTorch's own table are exchanged while a session
runs; ours go on to call PyTorch's afterwards. The native extension does that (`dtrrun/native/dlpack.h`).
Without it, functions of Python do; they cannot pass an error on, which is printed instead. New in PyTorch
2.10.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from typing import Any

import torch

from dtrrun.runtime.access import Reach

CAPSULE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
NAME = b"dlpack_exchange_api"
MAJOR = 1  # with another version, the table may have another form
PLACES = (3, 5)
"""Which words of the table (`DLPackExchangeAPI` in ATen/dlpack.h) are functions that export a tensor."""

_Function: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_is_valid: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Exports:
    """Brings tensors back before they are exported, while installed."""

    def __init__(self, reach: Reach, native: Any) -> None:
        """native: the extension, or None."""
        self._reach = reach
        self._guard: Callable[[Any, Any], Any] = _guard if native is None else native.guard_exports

    def install(self) -> None:
        if CAPSULE is not None:
            self._guard(CAPSULE, self._hand_out)

    def remove(self) -> None:
        if CAPSULE is not None:
            self._guard(CAPSULE, None)

    def _hand_out(self, tensor: torch.Tensor) -> None:
        self._reach(tensor, True, True)()


# -- without the native extension ----------------------------------------------------------------------------

_hand_out: Callable[[torch.Tensor], None] | None = None
_originals: dict[int, int] = {}  # by place
_ours: dict[int, Any] = {}


def _guard(capsule: Any, hand_out: Callable[[torch.Tensor], None] | None) -> None:
    """As `guard_exports` of the extension."""
    global _hand_out
    if not _is_valid(capsule, NAME):
        return
    address = _pointer(capsule, NAME)
    if ctypes.c_uint32.from_address(address).value != MAJOR:
        return
    table = (ctypes.c_void_p * (max(PLACES) + 1)).from_address(address)
    for place in PLACES:
        if place not in _ours and (original := table[place]):
            _originals[place] = original
            _ours[place] = _Function(_exporting(_Function(original)))
        if place in _ours:
            address = ctypes.cast(_ours[place], ctypes.c_void_p).value
            table[place] = _originals[place] if hand_out is None else address
    _hand_out = hand_out


def _exporting(original: Callable[[Any, Any], int]) -> Callable[[Any, Any], int]:
    def export(tensor: Any, out: Any) -> int:
        status = -1
        try:
            if _hand_out is not None and isinstance(tensor, torch.Tensor):
                _hand_out(tensor)
            status = original(tensor, out)
        except BaseException as error:
            traceback.print_exception(error)
        return status

    return export
