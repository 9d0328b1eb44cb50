"""dtrrun's use of NVML. `nvml` is the module pynvml, a `libnvml.Library`, or a test's substitute.

Every call into the driver may fail at any time: the functions here raise `nvml.NVMLError`, unless they
document None for that case. The launcher uses pynvml, on which it depends (`use_pynvml`); the program's
process may lack it, or have another package of that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dtrrun.monitor.libnvml import Library

NOT_AVAILABLE = 1 << 63
"""Sizes of at least this mean that none is available: NVML_VALUE_NOT_AVAILABLE is 2^64 - 1."""
LISTS = ("Compute", "Graphics", "MPSCompute")
LIBRARY: Any = Library()


def use_pynvml() -> None:
    """Use pynvml from now on, if it can be imported."""
    global LIBRARY
    with suppress(ImportError):
        LIBRARY = import_module("pynvml")


class NvmlUnavailable(Exception):
    """NVML cannot be used; the text says why."""


@contextmanager
def started(module: Any = None) -> Iterator[Any]:
    """Context in which NVML is initialised. Raises NvmlUnavailable."""
    nvml = start(module)
    try:
        yield nvml
    finally:
        stop(nvml)


def start(module: Any = None) -> Any:
    """Return NVML, initialised. Raises NvmlUnavailable."""
    module = module or LIBRARY
    try:
        module.nvmlInit()
    except (module.NVMLError, OSError) as error:
        raise NvmlUnavailable(str(error)) from None
    return module


def stop(nvml: Any) -> None:
    """Shut NVML down, whatever its state."""
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def processes(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Return bytes by process id, according to the driver (in a container: perhaps the host's ids).

    None if the driver does not report them (WSL, vGPU, confidential computing). A process with a compute and
    a graphics context is in two lists, each time with all of its memory: it counts once.
    """
    found: dict[int, int | None] = {}
    for kind in LISTS:
        try:
            entries = _listed(nvml, kind, handle)
        except nvml.NVMLError:
            if kind == LISTS[0]:
                raise
            continue  # no graphics, or no MPS: compute processes are in the first list
        for entry in entries:
            size = entry.usedGpuMemory
            known = size if size is not None and 0 < size < NOT_AVAILABLE else None
            found[entry.pid] = max(filter(None, (found.get(entry.pid), known)), default=None)
    return found


def _listed(nvml: Any, kind: str, handle: Any) -> list[Any]:
    """Return one of the driver's lists, by version 3 of the call if available (R510), else 2."""
    try:
        call = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")
        return list(call(handle))
    except nvml.NVMLError_FunctionNotFound:
        return list(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v2")(handle))


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device, in bytes."""

    total: int
    used: int
    exact: bool = True
    """Whether `used` excludes memory reserved by the driver; if False it may include it."""


def memory(nvml: Any, handle: Any) -> DeviceMemory:
    """Query memory by version 2 of the call, like nvidia-smi; by 1 before R510, or if 2 fails (under WSL)."""
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return DeviceMemory(int(found.total), int(found.used))
    except nvml.NVMLError:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceMemory(int(found.total), int(found.used), exact=False)
