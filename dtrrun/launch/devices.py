"""Finds how much memory a device has without torch, for percentages and for checking budgets."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from dtrrun.monitor.devices import all_devices, visible
from dtrrun.monitor.nvml import NvmlUnavailable, library, memory, started


def resolve(device: str, nvml: Any = None) -> str:
    """Resolve `auto` and `cuda`: `auto` is the first GPU that the driver shows, else the CPU.

    The runtime does the same, except for a PyTorch without CUDA, which causes a warning. Which of several
    GPUs a process uses is its own choice.
    """
    if device == "auto":
        return "cuda:0" if _cuda_total(0, nvml) is not None else "cpu"
    return "cuda:0" if device == "cuda" else device


def total_bytes(device: str, nvml: Any = None) -> int:
    """Return the memory of `device` (`cpu` or `cuda:N`) in bytes. Raises ValueError if there is none."""
    if device == "cpu":
        return min([psutil.virtual_memory().total, *_cgroup_limits()])
    index = int(device.removeprefix("cuda:"))
    total = _cuda_total(index, nvml)
    if total is None:
        raise ValueError(f"no CUDA device {index} is visible to the driver (dtrrun doctor says more)")
    return total


def _cgroup_limits() -> list[int]:
    """Return memory limits of this container (version 2, then 1), as seen from inside."""
    limits = []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" if there is no limit
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return limits


def _cuda_total(index: int, module: Any = None) -> int | None:
    """Return the bytes of the `index`-th device according to CUDA, or None."""
    try:
        return _asked(module or library(), index, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except NvmlUnavailable:
        return None


@cache  # a command asks several times, each of which would start NVML
def _asked(module: Any, index: int, variable: str | None) -> int | None:
    try:
        with started(module) as nvml:
            return memory(nvml, visible(all_devices(nvml), variable)[index].handle).total
    except (NvmlUnavailable, module.NVMLError, IndexError):
        return None
