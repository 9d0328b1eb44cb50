"""A fake driver: the NVML functions that dtrrun calls, for a machine described by plain numbers.

It replaces the whole module (`Sampler(nvml=…)`, `Ladder(…)`, `total_bytes(…, nvml=…)`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dtrrun.monitor import cuda_probe, gpus, kfd

MIB = 1 << 20
GIB = 1 << 30


def only_nvml(monkeypatch: Any) -> None:
    """Hide the machine's other drivers, and the environment variables that choose devices, if any."""
    gpus._nvidia.cache_clear()
    monkeypatch.setattr(cuda_probe, "LIBRARY", "libcuda.so.none")
    monkeypatch.setattr(kfd.gpus, "__defaults__", (Path("/none"),))
    for name in gpus.VARIABLES:
        monkeypatch.delenv(name, raising=False)


class NVMLError(Exception):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


@dataclass
class Gpu:
    """A GPU or a part of one. `compute` and similar fields: bytes by process id, or an error to raise."""

    uuid: str
    name: str = "NVIDIA H200"
    total: int = 80 * GIB
    used: int = 0
    reserved: int = 600 * MIB
    compute: Any = field(default_factory=dict)
    graphics: Any = field(default_factory=dict)
    mps: Any = field(default_factory=lambda: NVMLError_NotSupported("Not Supported"))
    parts: list[Gpu | None] | None = None
    """MIG devices by place; None: not in MIG mode."""
    part: tuple[int, int] = (0, 0)
    old: bool = False
    """A driver before R510: version 3 of the lists and version 2 of the memory are missing."""
    lost: bool = False


class FakeNvml:
    NVMLError = NVMLError
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    nvmlMemory_v2 = 0x02000028
    NVML_COMPUTEMODE_PROHIBITED = 2

    def __init__(self, *gpus: Gpu, library: bool = True, mode: int = 0) -> None:
        self.gpus = list(gpus)
        self.library, self.mode = library, mode
        self.open = self.starts = 0
        self.asked = 0

    def nvmlInit(self) -> None:
        self.starts += 1
        if not self.library:
            raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetNVMLVersion(self) -> bytes:
        return b"13.580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self._alive(self.gpus[index])

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return gpu.name

    def nvmlDeviceGetComputeMode(self, gpu: Gpu) -> int:
        return self.mode

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        if gpu.parts is None:
            raise NVMLError_NotSupported("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return len(gpu.parts or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, place: int) -> Gpu:
        part = (gpu.parts or [])[place]
        if part is None:
            raise NVMLError("Not Found")
        return part

    def nvmlDeviceGetGpuInstanceId(self, gpu: Gpu) -> int:
        return gpu.part[0]

    def nvmlDeviceGetComputeInstanceId(self, gpu: Gpu) -> int:
        return gpu.part[1]

    def nvmlDeviceGetComputeRunningProcesses_v3(self, gpu: Gpu) -> list[Any]:
        return self._entries(gpu, gpu.compute, 3)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, gpu: Gpu) -> list[Any]:
        return self._entries(gpu, gpu.compute, 2)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, gpu: Gpu) -> list[Any]:
        return self._entries(gpu, gpu.graphics, 3)

    def nvmlDeviceGetGraphicsRunningProcesses_v2(self, gpu: Gpu) -> list[Any]:
        return self._entries(gpu, gpu.graphics, 2)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, gpu: Gpu) -> list[Any]:
        return self._entries(gpu, gpu.mps, 3)

    def nvmlDeviceGetMPSComputeRunningProcesses_v2(self, gpu: Gpu) -> list[Any]:
        return self._entries(gpu, gpu.mps, 2)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu, version: int | None = None) -> Any:
        self._alive(gpu)
        if version is None:
            return SimpleNamespace(total=gpu.total, used=gpu.used + gpu.reserved)
        if gpu.old:
            raise NVMLError_FunctionNotFound("Function Not Found")
        return SimpleNamespace(total=gpu.total, used=gpu.used, reserved=gpu.reserved)

    def _entries(self, gpu: Gpu, processes: Any, version: int) -> list[Any]:
        self._alive(gpu)
        self.asked += 1
        if version == 3 and gpu.old:
            raise NVMLError_FunctionNotFound("Function Not Found")
        if isinstance(processes, Exception):
            raise processes
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()]

    def _alive(self, gpu: Gpu) -> Gpu:
        if gpu.lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        return gpu
