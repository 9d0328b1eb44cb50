"""The driver's part of `dtrrun doctor`: versions, devices, and which source works for a process."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrrun.monitor.devices import Device, order_is_certain, visible
from dtrrun.monitor.ladder import Ladder
from dtrrun.monitor.nvml import memory, processes
from dtrrun.telemetry.record import Snapshot, pid_namespace


def versions(nvml: Any) -> dict[str, str | None]:
    """Return the versions of the driver, of NVML, and of the CUDA that the driver supports."""
    cuda = _asked(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "driver": _text(_asked(nvml, nvml.nvmlSystemGetDriverVersion)),
        "nvml": _text(_asked(nvml, nvml.nvmlSystemGetNVMLVersion)),
        "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


def device_facts(ladder: Ladder) -> dict[str, Any]:
    """`devices`: GPUs, MIG devices; `visible`: UUIDs in CUDA's order; `order_is_certain`: whether it is."""
    nvml, counted = ladder.nvml, visible(ladder.devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {
        "devices": [_facts(nvml, device) for device in ladder.devices],
        "visible": [device.uuid for device in counted],
        "order_is_certain": order_is_certain(ladder.devices, os.environ.get("CUDA_DEVICE_ORDER")),
    }


def _facts(nvml: Any, device: Device) -> dict[str, Any]:
    space = _asked(nvml, memory, nvml, device.handle)
    listed = _asked(nvml, processes, nvml, device.handle)
    mode = None if device.part else _asked(nvml, nvml.nvmlDeviceGetComputeMode, device.handle)
    return {
        "index": device.index,
        "uuid": device.uuid,
        "name": _text(device.name),
        "part_of": device.parent or None,
        "mig": device.mig,
        "total_bytes": space.total if space else None,
        "used_bytes": space.used if space else None,
        "processes": None if listed is None else len(listed),
        "prohibited": mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
    }


def source_for(ladder: Ladder, probe: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the source and bytes that the ladder finds for the process of `runtime/probe.py`."""
    if "reserved_bytes" not in probe:
        return None
    here = {"device": "cuda", "device_uuid": probe["uuid"], "pid_namespace": pid_namespace()}
    counters = {"device_index": probe["index"], "reserved_bytes": probe["reserved_bytes"]}
    found = ladder.read([Snapshot(pid=probe["pid"], meta=here, counters=counters)])
    for _, figure in found.values():
        return figure.source, figure.nbytes
    return None


def surroundings(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, Any]:
    """Return what affects the driver's answers: WSL, or a container."""
    marks = (root / ".dockerenv", root / "run" / ".containerenv")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "wsl": "microsoft" in platform.release().lower(),
        "container": any(map(Path.exists, marks))
        or bool({"container", "KUBERNETES_SERVICE_HOST"} & set(environ)),
    }


def _asked(nvml: Any, call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
