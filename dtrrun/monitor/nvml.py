"""NVML as dtrrun uses it. `nvml` is the module pynvml, or what a test puts in its place.

Every call into the driver may fail, at any time: the functions here raise `nvml.NVMLError`, except where they
say that None stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

NOT_AVAILABLE = 1 << 63
"""From here on a size is no size: NVML_VALUE_NOT_AVAILABLE is 2^64 - 1."""
LISTS = ("Compute", "Graphics", "MPSCompute")


class NvmlUnavailable(Exception):
    """There is no NVML to ask; the text says why."""


@contextmanager
def started(module: Any = None) -> Iterator[Any]:
    """NVML between its init and shutdown. Raises NvmlUnavailable."""
    nvml = start(module)
    try:
        yield nvml
    finally:
        stop(nvml)


def start(module: Any = None) -> Any:
    """NVML, ready to be asked. Raises NvmlUnavailable."""
    module = module or library()
    try:
        module.nvmlInit()
    except (module.NVMLError, OSError) as error:
        raise NvmlUnavailable(str(error)) from None
    return module


def library() -> Any:
    """The module pynvml. Raises NvmlUnavailable."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError as error:
        raise NvmlUnavailable(f"nvidia-ml-py cannot be imported: {error}") from None
    return pynvml


def stop(nvml: Any) -> None:
    """Let go of it, whatever state it is in."""
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def processes(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Bytes by process id, as the driver counts processes (in a container: perhaps the host's ids).

    None where the driver does not tell (WSL, vGPU, confidential computing). A process with a compute and a
    graphics context stands in two lists, each time with all of its memory: it counts once.
    """
    found: dict[int, int | None] = {}
    for kind in LISTS:
        try:
            entries = _listed(nvml, kind, handle)
        except nvml.NVMLError:
            if kind == LISTS[0]:
                raise
            continue  # a device without graphics, a driver without MPS: what computes is in the first
        for entry in entries:
            size = entry.usedGpuMemory
            known = size if size is not None and 0 < size < NOT_AVAILABLE else None
            found[entry.pid] = max(filter(None, (found.get(entry.pid), known)), default=None)
    return found


def _listed(nvml: Any, kind: str, handle: Any) -> list[Any]:
    """One of the driver's lists: version 3 of the call, where the driver has it (R510), or 2."""
    try:
        call = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")
        return list(call(handle))
    except nvml.NVMLError_FunctionNotFound:
        return list(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v2")(handle))


@dataclass(frozen=True)
class Memory:
    """Of a device, in bytes."""

    total: int
    used: int
    exact: bool = True
    """`used` leaves out what the driver keeps for itself; False: perhaps it does not."""


def memory(nvml: Any, handle: Any) -> Memory:
    """By version 2 of the call, as in nvidia-smi; by 1 before R510, and where 2 fails (under WSL)."""
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return Memory(int(found.total), int(found.used))
    except nvml.NVMLError:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return Memory(int(found.total), int(found.used), exact=False)
