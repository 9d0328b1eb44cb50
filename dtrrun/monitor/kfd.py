"""AMD's GPUs and the memory of their processes, as the kernel driver KFD shows them in sysfs.

In a container, nodes of other GPUs cannot be read, and processes have the host's ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dtrrun.monitor.devices import Device, visible
from dtrrun.monitor.namespaces import listed_here

KFD = Path("/sys/class/kfd/kfd")
ON_THE_GPU = (1, 2)  # HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE


class Handle(NamedTuple):
    """What KFD reports about a GPU."""

    gpu_id: int
    total_bytes: int


def gpus(environ: Mapping[str, str], kfd: Path = KFD) -> list[Device]:
    """Return HIP's devices 0, 1, 2 … Each has a `Handle`."""
    found = visible(_all(kfd), environ.get("ROCR_VISIBLE_DEVICES"))
    return visible(found, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))


def _all(kfd: Path) -> list[Device]:
    found: list[Device] = []
    for node in sorted(kfd.glob("topology/nodes/*"), key=lambda node: int(node.name)):
        with suppress(OSError, ValueError):  # not ours to use
            facts = _numbers(node / "properties")
            if facts.get("simd_count"):  # else it is a CPU
                banks = [_numbers(bank) for bank in node.glob("mem_banks/*/properties")]
                total = sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in ON_THE_GPU)
                handle = Handle(int((node / "gpu_id").read_text()), total)
                found.append(Device(f"GPU-{facts.get('unique_id', 0):016x}", len(found), "AMD GPU", handle))
    return found


def process_bytes(pid: int, gpu: Device, kfd: Path = KFD) -> int | None:
    """Return the memory of a process on a GPU; None if it has none, or if KFD uses the host's ids."""
    with suppress(OSError, ValueError):
        if listed_here(int(process.name) for process in kfd.glob("proc/*")):
            return int((kfd / "proc" / str(pid) / f"vram_{gpu.handle.gpu_id}").read_text())
    return None


def _numbers(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in file.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
