"""NVML through ctypes, as far as dtrrun uses it. Names, results and errors are those of the module pynvml.

The library comes with the driver. The session uses it too, in the program's environment, which may lack
pynvml.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import (
    CDLL,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_uint,
    c_ulonglong,
    c_void_p,
    create_string_buffer,
    sizeof,
)
from functools import partial
from typing import Any

NAME = "libnvidia-ml.so.1"
TOO_SMALL, FUNCTION_NOT_FOUND = 7, 13  # NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_FUNCTION_NOT_FOUND
TEXT_BYTES = 96  # the longest of NVML's buffers: names, UUIDs, versions
TEXTS = {
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
}
NUMBERS = {
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlSystemGetCudaDriverVersion_v2",
}
"""Functions by what they return."""


class NVMLError(Exception):
    """The driver could not answer; the text says why."""


class NVMLError_FunctionNotFound(NVMLError):
    """The driver is older than the function."""


class Memory(Structure):
    """Version 1 of the struct."""

    _fields_ = [(name, c_ulonglong) for name in ("total", "free", "used")]


class Memory_v2(Structure):
    """`used` excludes what is `reserved` by the driver."""

    _fields_ = [("version", c_uint), *((name, c_ulonglong) for name in ("total", "reserved", "free", "used"))]


class ProcessInfo(Structure):
    """An entry of the lists, versions 2 and 3."""

    _fields_ = [
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    ]


class Library:
    """Stand-in for the module pynvml. Raises NVMLError."""

    NVMLError = NVMLError
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVML_COMPUTEMODE_PROHIBITED = 2
    nvmlMemory_v2 = sizeof(Memory_v2) | 2 << 24

    def __init__(self) -> None:
        self._library: CDLL | None = None

    def nvmlInit(self) -> None:
        try:
            self._library = CDLL(NAME)
        except OSError:
            raise NVMLError(f"{NAME} cannot be loaded") from None
        self._call("nvmlInit_v2")

    def nvmlShutdown(self) -> None:
        self._call("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        return self._number("nvmlDeviceGetCount_v2")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> c_void_p:
        return self._handle("nvmlDeviceGetHandleByIndex_v2", c_uint(index))

    def nvmlDeviceGetMigMode(self, handle: c_void_p) -> list[int]:
        now, later = c_uint(), c_uint()
        self._call("nvmlDeviceGetMigMode", handle, byref(now), byref(later))
        return [now.value, later.value]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: c_void_p, place: int) -> c_void_p:
        return self._handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, c_uint(place))

    def nvmlDeviceGetMemoryInfo(self, handle: c_void_p, version: int | None = None) -> Memory | Memory_v2:
        if version is None:
            found = Memory()
            self._call("nvmlDeviceGetMemoryInfo", handle, byref(found))
            return found
        newer = Memory_v2(version=version)
        self._call("nvmlDeviceGetMemoryInfo_v2", handle, byref(newer))
        return newer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function that takes a handle at most, and has one result."""
        if name in TEXTS:
            return partial(self._text, name)
        if name in NUMBERS:
            return partial(self._number, name)
        if name.endswith(("RunningProcesses_v2", "RunningProcesses_v3")):
            return partial(self._processes, name)
        raise AttributeError(name)

    def _processes(self, name: str, handle: c_void_p) -> list[ProcessInfo]:
        room = 16
        while True:
            count, listed = c_uint(room), (ProcessInfo * room)()
            try:
                self._call(name, handle, byref(count), listed)
            except NVMLError as error:
                if error.args[1:] != (TOO_SMALL,):
                    raise
                room = 2 * max(count.value, room)  # more processes may start meanwhile
            else:
                return list(listed[: count.value])

    def _text(self, name: str, *arguments: Any) -> str:
        text = create_string_buffer(TEXT_BYTES)
        self._call(name, *arguments, text, c_uint(TEXT_BYTES))
        return text.value.decode(errors="replace")

    def _number(self, name: str, *arguments: Any) -> int:
        number = c_int()
        self._call(name, *arguments, byref(number))
        return number.value

    def _handle(self, name: str, *arguments: Any) -> c_void_p:
        handle = c_void_p()
        self._call(name, *arguments, byref(handle))
        return handle

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NVMLError_FunctionNotFound(f"NVML has no {name}") from None
        code = function(*arguments)
        if code:
            kind = NVMLError_FunctionNotFound if code == FUNCTION_NOT_FOUND else NVMLError
            raise kind(self._said(code), code)

    def _said(self, code: int) -> str:
        function: Any = self._library and self._library.nvmlErrorString
        function.restype = c_char_p
        return (function(code) or b"").decode(errors="replace") or f"NVML's error {code}"
