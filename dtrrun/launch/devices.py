"""How much memory a device has, asked without torch: for percentages and for budgets that are too large."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def resolve(device: str) -> str:
    """`auto` and `cuda` made definite, as the runtime does it: `auto` is the CPU."""
    return {"auto": "cpu", "cuda": "cuda:0"}.get(device, device)


def total_bytes(device: str) -> int:
    """Memory of `device` (`cpu` or `cuda:N`) in bytes. Raises ValueError where there is no such device."""
    if device == "cpu":
        return min([psutil.virtual_memory().total, *_cgroup_limits()])
    index = int(device.removeprefix("cuda:"))
    total = _cuda_total(index)
    if total is None:
        raise ValueError(f"no CUDA device {index} is visible to the driver")
    return total


def _cgroup_limits() -> list[int]:
    """Memory limits of the container this runs in (version 2, then 1), as seen from inside it."""
    limits = []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" where there is no limit
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return limits


def _cuda_total(index: int) -> int | None:
    """Bytes of the `index`-th device of CUDA_VISIBLE_DEVICES, or None where there is none."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        name = str(index) if visible is None else [part.strip() for part in visible.split(",")][index]
        if name.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except (pynvml.NVMLError, IndexError):
        return None
    finally:
        pynvml.nvmlShutdown()
