"""The driver's figures for a running process, by NVML: a thread that samples every 50 ms."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from dtrrun.monitor.devices import all_devices, visible
from dtrrun.monitor.nvml import NvmlUnavailable, processes, start

EVERY = 0.05
"""Seconds. PyTorch's allocator keeps what it has reserved, so a peak is rarely shorter."""


@dataclass(frozen=True)
class Device:
    """One GPU, as NVML knows it."""

    nvml: Any
    handle: Any
    driver: str


def first_device(nvml: Any = None) -> Device | None:
    """Return the GPU that is `cuda:0` for a child; None if NVML shows none."""
    try:
        nvml = start(nvml)
    except NvmlUnavailable:
        return None
    found = visible(all_devices(nvml), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Device(nvml, found[0].handle, nvml.nvmlSystemGetDriverVersion()) if found else None


def of_processes(device: Device, pids: set[int]) -> int | None:
    """Return the driver's bytes for `pids` together; None if it does not list them or has no figure."""
    try:
        shown = processes(device.nvml, device.handle)
    except device.nvml.NVMLError:
        return None
    found = [size for pid, size in shown.items() if pid in pids and size is not None]
    return sum(found) if found else None


def in_use(device: Device) -> int:
    """Return the bytes in use on the whole device; 0 if NVML fails."""
    try:
        return int(device.nvml.nvmlDeviceGetMemoryInfo(device.handle).used)
    except device.nvml.NVMLError:
        return 0


class Sampler:
    """`with Sampler(device) as sampler: sampler.pid = …`; afterwards `peak` bytes, and their `source`.

    `"process"`: the figure for the process and its descendants. `"device"`: if NVML does not list these (a
    container, MIG), the growth of the device's used memory, which is theirs if nothing else uses the device.
    """

    def __init__(self, device: Device | None) -> None:
        self.device = device
        self.pid: int | None = None
        self._of_processes = self._of_device = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        if self.device is not None:
            self._before = in_use(self.device)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def source(self) -> str | None:
        return "process" if self._of_processes else "device" if self._of_device else None

    @property
    def peak(self) -> int | None:
        return (self._of_processes or self._of_device) or None

    def look(self) -> None:
        assert self.device is not None
        if self.pid is not None:
            shown = of_processes(self.device, family(self.pid))
            self._of_processes = max(self._of_processes, shown or 0)
            self._of_device = max(self._of_device, in_use(self.device) - self._before)

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            self.look()


def family(pid: int) -> set[int]:
    """Return the process and all its descendants: under dtrrun, a child trains."""
    with suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return {pid}
