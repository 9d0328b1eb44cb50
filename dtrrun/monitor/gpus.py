"""Which device a budget is for: what `--device` means, for the launcher and for the session alike.

A GPU is used if PyTorch is built for it and CUDA, or ROCm's HIP, sees it. To find out, nothing is initialised
here: that would break CUDA in forked children, and fix CUDA_VISIBLE_DEVICES before the program can set it.
NVML answers in milliseconds. Where it does not (a container without it, WSL, vGPU, Jetson), a separate
process queries CUDA. AMD's kernel driver provides the information in files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache
from typing import Any

from dtrrun.monitor import cuda_probe, kfd
from dtrrun.monitor.devices import all_devices, visible
from dtrrun.monitor.nvml import NvmlUnavailable, memory, started

CUDA, HIP, NEITHER = "cuda", "hip", "cpu"
"""What a PyTorch is built for."""
PROBE_SECONDS = 60.0  # `cuInit` takes a second for each GPU whose driver was not loaded before
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Gpus:
    """The devices `cuda:0`, `cuda:1` … of a program that is started now."""

    sizes: tuple[int, ...]
    """Their memory in bytes."""
    why: str = ""
    """Why there are none, if there are none."""
    nvml: bool = False
    """Whether all of this comes from NVML."""


def choose(device: str, build: str | None, see: Callable[[str | None], Gpus]) -> str:
    """Return the device of a budget for `--device`: `cpu`, `cuda` (the program's current one) or `cuda:N`.

    build: what PyTorch is built for; None if that is not known. see: `gpus`, or a substitute.
    Raises ValueError for a GPU that does not exist.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return device
    if build == NEITHER:
        if kind == "auto":
            return "cpu"
        raise ValueError(f"{device}: this PyTorch is built for the CPU")
    found = see(build)
    if kind == "auto":
        return "cuda" if found.sizes else "cpu"
    if int(index or 0) >= len(found.sizes):
        number = len(found.sizes)
        why = f"{number} {'is' if number == 1 else 'are'} visible" if number else found.why
        raise ValueError(f"no CUDA device {index or 0}: {why} (dtrrun doctor says more)")
    return device


def build_of(version: Any) -> str:
    """Return what a PyTorch is built for. version: has `cuda` and `hip`, like `torch.version`."""
    return CUDA if getattr(version, "cuda", None) else HIP if getattr(version, "hip", None) else NEITHER


def gpus(build: str | None, nvml: Any = None) -> Gpus:
    """Return the GPUs that a PyTorch of this build can use, in its order."""
    environ = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    found = _nvidia(nvml, tuple(environ.items())) if build != HIP else Gpus(())
    if not found.sizes and build != CUDA:
        amd = kfd.gpus(environ)
        if amd or build == HIP:
            sizes = tuple(gpu.handle.total_bytes for gpu in amd)
            found = Gpus(sizes, f"AMD's driver shows none in {kfd.KFD / 'topology'}{_hidden(environ)}")
    return found


@cache  # a command calls this several times, and each call may take long
def _nvidia(nvml: Any, variables: tuple[tuple[str, str], ...]) -> Gpus:
    environ = dict(variables)
    try:
        with started(nvml) as nvml:
            if devices := all_devices(nvml):
                counted = visible(devices, environ.get("CUDA_VISIBLE_DEVICES"))
                sizes = tuple(memory(nvml, device.handle).total for device in counted)
                return Gpus(sizes, f"none is visible{_hidden(environ)}", nvml=True)
            why = "NVML shows none"
    except NvmlUnavailable as error:
        why = str(error)
    except nvml.NVMLError as error:
        why = f"NVML: {error}"
    try:
        sizes = _by_cuda()
    except OSError as error:
        return Gpus((), f"{why}; {error}")
    return Gpus(sizes, f"CUDA shows none{_hidden(environ)}")


def _by_cuda() -> tuple[int, ...]:
    """Query CUDA in another process. Raises OSError."""
    try:
        CDLL(cuda_probe.LIBRARY)  # without a driver, this is the only cost
    except OSError:
        raise OSError(f"{cuda_probe.LIBRARY} cannot be loaded") from None
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("CUDA cannot be asked without an interpreter")
    command = [sys.executable, "-I", "-S", cuda_probe.__file__, cuda_probe.LIBRARY]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS, check=False
        )
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise OSError(f"CUDA does not answer within {PROBE_SECONDS:.0f} s") from None
    except ValueError:
        raise OSError(f"CUDA ended the process that asked it ({done.returncode})") from None
    if "why" in told:
        raise OSError(told["why"])
    return tuple(told["devices"])


def _hidden(environ: Mapping[str, str]) -> str:
    """Return the variables that may hide devices, for an error message."""
    found = [f"{name}={text}" for name, text in environ.items() if name.endswith("VISIBLE_DEVICES")]
    return f" ({', '.join(found)})" if found else ""
