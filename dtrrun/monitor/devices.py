"""The devices of the machine, and CUDA's numbering of them.

The rules of CUDA_VISIBLE_DEVICES are those of the CUDA programming guide's appendix on environment variables
and of NVIDIA's guide to MIG (device enumeration).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_MIG_BY_NUMBERS = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/(\d+)/(\d+)")  # names before R470
_NUMBER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Device:
    """A GPU, or one part of a GPU in MIG mode."""

    uuid: str
    index: int
    """The GPU's index in nvidia-smi."""
    name: str
    handle: Any = field(default=None, compare=False, repr=False)
    mig: bool = False
    """Whether this is a GPU in MIG mode: programs run only in its parts."""
    part: tuple[int, int] | None = None
    """GPU instance and compute instance of a MIG device; None for a GPU."""
    parent: str = ""
    """UUID of the GPU to which a MIG device belongs."""


def all_devices(nvml: Any) -> list[Device]:
    """Return every GPU that the driver shows, each followed by its MIG devices."""
    found = []
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return []
    for index in range(count):
        with suppress(nvml.NVMLError):  # lost, or not accessible: the others are still returned
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = Device(
                uuid=nvml.nvmlDeviceGetUUID(handle),
                index=index,
                name=nvml.nvmlDeviceGetName(handle),
                handle=handle,
                mig=_in_mig_mode(nvml, handle),
            )
            found.append(gpu)
            if gpu.mig:
                found += _parts(nvml, gpu)
    return found


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # most GPUs have no MIG mode
        return False


def _parts(nvml: Any, gpu: Device) -> list[Device]:
    found = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)):
        with suppress(nvml.NVMLError):  # a slot without a device
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
            found.append(
                Device(
                    uuid=nvml.nvmlDeviceGetUUID(handle),
                    index=gpu.index,
                    name=nvml.nvmlDeviceGetName(handle),
                    handle=handle,
                    part=(
                        nvml.nvmlDeviceGetGpuInstanceId(handle),
                        nvml.nvmlDeviceGetComputeInstanceId(handle),
                    ),
                    parent=gpu.uuid,
                )
            )
    return found


def visible(devices: Sequence[Device], variable: str | None) -> list[Device]:
    """Return CUDA's devices 0, 1, 2 … when CUDA_VISIBLE_DEVICES is `variable` (None: not set).

    An invalid entry hides all that follow; a repeated one hides all. A GPU in MIG mode stands for its first
    part, and with a MIG device no whole GPU is counted. CUDA orders the GPUs as the driver does (by PCI bus)
    if CUDA_DEVICE_ORDER says so or they are all alike: see `order_is_certain`.
    """
    gpus = [device for device in devices if device.part is None]
    chosen: list[Device] = []
    if variable is None:
        chosen = gpus
    else:
        for entry in variable.split(","):
            device = _meant(devices, gpus, entry.strip())
            if device is None:
                break
            if device in chosen:
                return []
            chosen.append(device)
    counted = [part for device in chosen if (part := _usable(devices, device))]
    parts = [device for device in counted if device.part is not None]
    return list(dict.fromkeys(parts)) or counted


def _meant(devices: Sequence[Device], gpus: Sequence[Device], entry: str) -> Device | None:
    if numbers := _MIG_BY_NUMBERS.fullmatch(entry):
        part = (int(numbers[2]), int(numbers[3]))
        found = [device for device in devices if device.parent == numbers[1] and device.part == part]
    elif entry.startswith(("GPU-", "MIG-")):
        found = [device for device in devices if device.uuid.startswith(entry)]
    elif number := _NUMBER.match(entry):  # as in strtoul, what follows the digits is ignored
        found = list(gpus[int(number[0]) : int(number[0]) + 1]) if int(number[0]) >= 0 else []
    else:
        return None
    return found[0] if len(found) == 1 else None


def _usable(devices: Sequence[Device], device: Device) -> Device | None:
    if not device.mig:
        return device
    return next((part for part in devices if part.parent == device.uuid), None)


def by_uuid(devices: Sequence[Device], uuid: str, numbered: Sequence[Device] = ()) -> Device | None:
    """Return the device of that UUID, with or without NVML's prefix `GPU-` or `MIG-`.

    numbered: the device to which CUDA's number refers, if known. CUDA may report the GPU's UUID for each of
    its parts.
    """
    plain = uuid.removeprefix("GPU-").removeprefix("MIG-")
    for device in devices:
        if device.uuid.removeprefix("GPU-").removeprefix("MIG-") == plain:
            return _usable([*numbered, *devices], device)
    return None


def order_is_certain(devices: Sequence[Device], order: str | None) -> bool:
    """Return whether CUDA numbers GPUs as NVML does: by default the fastest comes first, if they differ."""
    names = {device.name for device in devices if device.part is None}
    return order == "PCI_BUS_ID" or len(names) < 2
