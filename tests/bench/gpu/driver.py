"""What the driver shows for a process while it runs, by NVML: a thread that looks every 50 ms."""

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
"""Seconds. PyTorch's allocator keeps what it has reserved, so that a peak seldom lasts for less."""


@dataclass(frozen=True)
class Device:
    """One GPU, as NVML knows it."""

    nvml: Any
    handle: Any
    driver: str


def first_device(nvml: Any = None) -> Device | None:
    """The GPU that is `cuda:0` for a child; None where NVML has none to show."""
    try:
        nvml = start(nvml)
    except NvmlUnavailable:
        return None
    found = visible(all_devices(nvml), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Device(nvml, found[0].handle, nvml.nvmlSystemGetDriverVersion()) if found else None


def of_processes(device: Device, pids: set[int]) -> int | None:
    """Bytes that the driver shows for `pids` together; None where it does not know these, or no figure."""
    try:
        shown = processes(device.nvml, device.handle)
    except device.nvml.NVMLError:
        return None
    found = [size for pid, size in shown.items() if pid in pids and size is not None]
    return sum(found) if found else None


def in_use(device: Device) -> int:
    """Bytes in use on the device as a whole; 0 where NVML fails."""
    try:
        return int(device.nvml.nvmlDeviceGetMemoryInfo(device.handle).used)
    except device.nvml.NVMLError:
        return 0


class Sampler:
    """`with Sampler(device) as sampler: sampler.pid = …`; afterwards `peak` bytes, and their `source`.

    `"process"`: what is shown for the process and its descendants. `"device"`: where these are not in NVML's
    list (a container, MIG), by how much more of the device was in use than before; that is theirs if nobody
    else uses it.
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
    """The process and all that descend from it: under dtrrun it is a child that trains."""
    with suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return {pid}
