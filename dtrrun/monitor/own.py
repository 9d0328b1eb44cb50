"""What the driver shows for this process itself, for a session without a launcher to report it.

In a container, the driver may list processes by the host's ids, and another process's may equal ours: then
there is no figure.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from dtrrun.monitor import kfd
from dtrrun.monitor.devices import Device, all_devices, by_uuid, visible
from dtrrun.monitor.namespaces import listed_here
from dtrrun.monitor.nvml import NvmlUnavailable, processes, start


class OwnMemory:
    """This process's memory on the device with this UUID (may be empty) and CUDA number. Never raises."""

    def __init__(self, uuid: str, index: int, nvml: Any = None) -> None:
        self._nvml: Any = None
        self._device: Device | None = None
        with suppress(NvmlUnavailable):
            self._nvml = start(nvml)  # until the process ends
            devices = all_devices(self._nvml)
            numbered = visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))[index : index + 1]
            self._device = by_uuid(devices, uuid, numbered) or next(iter(numbered), None)
        amd = kfd.gpus(os.environ)[index : index + 1] if self._device is None else []
        self._amd = next(iter(amd), None)

    def nbytes(self) -> int | None:
        """Return the bytes, or None if the driver does not report them."""
        if self._amd is not None:
            return kfd.process_bytes(os.getpid(), self._amd)
        if self._device is None:
            return None
        try:
            listed = processes(self._nvml, self._device.handle)
        except self._nvml.NVMLError:
            return None
        return listed.get(os.getpid()) if listed_here(listed) else None
