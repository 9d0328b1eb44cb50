"""The device of a run and its memory, without torch: for percentages, and for checking budgets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from dtrrun.launch.torch_build import build_of
from dtrrun.monitor.gpus import choose, gpus


def resolve(device: str, build: str | None = None, nvml: Any = None) -> str:
    """Return `cpu` or `cuda:N` for `--device`, without checking a GPU that it names.

    build: what the target's PyTorch is built for, if known. Each process itself chooses among several GPUs.
    """
    if device == "auto":
        device = choose(device, build, lambda build: gpus(build, nvml))
    return "cuda:0" if device == "cuda" else device


def target_build(python: Callable[[], str]) -> str | None:
    """Return what the PyTorch of an interpreter is built for, if that matters here and can be known.

    python: returns the interpreter; not called without a GPU.
    """
    return build_of(python()) if gpus(None).sizes else None


def total_bytes(device: str, build: str | None = None, nvml: Any = None) -> int:
    """Return the memory of `device` (`cpu` or `cuda:N`) in bytes. Raises ValueError if there is none."""
    if device == "cpu":
        return min([psutil.virtual_memory().total, *_cgroup_limits()])
    choose(device, build, lambda build: gpus(build, nvml))
    return gpus(build, nvml).sizes[int(device.removeprefix("cuda:"))]


def _cgroup_limits() -> list[int]:
    """Return memory limits of this container (cgroup version 2, then 1), as seen from inside."""
    limits = []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" if there is no limit
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return limits
