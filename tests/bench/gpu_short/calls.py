"""What calls of the driver and of PyTorch's allocator cost on a GPU, and what events say of a kernel's time.

Everything is printed with its unit: "host" is the time until the call returns, "wall" until the GPU is done.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch

from dtrrun.monitor.own import OwnMemory
from dtrrun.runtime.cuda.sums import Sums

MIB = 1 << 20
TIMES = 7
FLUSHED_GB = (0.2, 0.8, 2.0, 6.0)
SNAPSHOT_BLOCKS = (300, 3000)
FINGERPRINT_MB = (4, 256)
HOST_US = (0, 30, 70, 120)
"""The host's time between two records of an event: with no reason for care, and with one."""


def say(what: str, found: str) -> None:
    print(f"{what:66} {found}", flush=True)


def bytes_of(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def host_ms(call: Callable[[], Any], times: int = TIMES) -> str:
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        found.append((time.perf_counter() - started) * 1e3)
    return f"{statistics.median(found):.4f} ms host (most: {max(found):.3f})"


class Work:
    """Matrix products that keep the GPU busy for `ms` each."""

    def __init__(self) -> None:
        self._x = torch.randn(8192, 8192, device="cuda")
        self.queue(2)
        self.ms = self._wall(2) / 2

    def queue(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._x, self._x)

    def _wall(self, count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.queue(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    def beside(self, call: Callable[[], Any]) -> str:
        """Time a call while three products are queued. It waits for them if it takes as long."""
        torch.cuda.synchronize()
        self.queue(3)
        started = time.perf_counter()
        call()
        took = (time.perf_counter() - started) * 1e3
        torch.cuda.synchronize()
        return f"{took:.3f} ms host"


def figures(work: Work) -> None:
    own = OwnMemory(str(torch.cuda.get_device_properties(0).uuid), 0)
    calls: dict[str, Callable[[], Any]] = {
        "cudaMemGetInfo": torch.cuda.mem_get_info,
        "allocator's statistics": lambda: torch._C._cuda_memoryStats(0),
        "set_per_process_memory_fraction": lambda: torch.cuda.set_per_process_memory_fraction(1.0),
        "the driver's figure for this process (NVML)": own.nbytes,
    }
    say("a product", f"{work.ms:.1f} ms wall")
    for name, call in calls.items():
        say(name, host_ms(call))
        say(f"{name}, beside three products", work.beside(call))
    say("the driver's figure", str(own.nbytes()))


def events(work: Work) -> None:
    x = torch.randn(1 << 20, device="cuda")

    def pairs(host_us: float) -> str:
        found = []
        for _ in range(60):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            reached = start.query()
            until = time.perf_counter() + host_us * 1e-6
            while time.perf_counter() < until:
                pass
            x.mul(2.0)
            reached = start.query()
            end.record()
            found.append((start, end, reached))
        torch.cuda.synchronize()
        us = [a.elapsed_time(b) * 1e3 for a, b, _ in found]
        reached = sum(reached for _, _, reached in found)
        return f"median {statistics.median(us):.1f} µs, least {min(us):.1f}; start reached: {reached} of 60"

    pairs(0)
    for host in HOST_US:
        say(f"events around a multiply of 4 MB, {host} µs of the host between", pairs(host))
    torch.cuda.synchronize()
    work.queue(2)
    say("the same, queued behind products", pairs(0))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(200):
        torch.cuda.Event(enable_timing=True).record()
    say("making and recording an event", f"{(time.perf_counter() - started) * 5e3:.2f} µs host")


def flushes(work: Work) -> None:
    torch.cuda.empty_cache()
    kept = bytes_of(2 * MIB)  # otherwise the address range is returned, too
    for gb in FLUSHED_GB:
        nbytes = int(gb * 1e9) // (20 * MIB) * 20 * MIB

        def wall(flush: bool, nbytes: int = nbytes) -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            work.queue(1)
            if flush:
                torch.cuda.empty_cache()
            block = bytes_of(nbytes)
            block.zero_()
            work.queue(1)
            torch.cuda.synchronize()
            return (time.perf_counter() - started) * 1e3

        bytes_of(nbytes)
        unmap, again, touch = [], [], []
        for _ in range(TIMES):
            torch.cuda.synchronize()
            marks = [time.perf_counter()]
            torch.cuda.empty_cache()
            marks.append(time.perf_counter())
            block = bytes_of(nbytes)
            marks.append(time.perf_counter())
            block.zero_()
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            del block
            for found, (begun, ended) in zip((unmap, again, touch), pairwise(marks), strict=True):
                found.append((ended - begun) * 1e3)
        medians = ", ".join(
            f"{name} {statistics.median(found):.2f}"
            for name, found in (("unmap", unmap), ("map", again), ("first touch", touch))
        )
        say(f"{gb} GB, idle GPU", f"{medians} ms")
        without, flushed = (min(wall(flush) for _ in range(4)) for flush in (False, True))
        say(f"{gb} GB: a flush between queued work adds", f"{flushed - without:.2f} of {without:.1f} ms wall")
    del kept


def refusals() -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * MIB) / total)

    def refused() -> None:
        with suppress(torch.OutOfMemoryError):
            bytes_of(400 * MIB)

    say("a refused request, nothing cached", host_ms(refused))
    torch.cuda.set_per_process_memory_fraction(1.0)
    kept: list[torch.Tensor] = []
    for blocks in SNAPSHOT_BLOCKS:
        kept += [bytes_of(2 * MIB) for _ in range(blocks - len(kept))]
        say(f"a snapshot of {blocks} blocks", host_ms(torch.cuda.memory_snapshot))


def fingerprints() -> None:
    """Those of `--verify`. A step evicts and brings back each of some hundred storages at most."""
    sums = Sums(torch.device("cuda"))
    for mb in FINGERPRINT_MB:
        storage = bytes_of(mb * MIB).untyped_storage()
        say(f"a fingerprint of {mb} MiB", host_ms(lambda storage=storage: sums.of(storage, storage.nbytes())))
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(TIMES):
            sums.of(storage, storage.nbytes())
        torch.cuda.synchronize()
        say("the same, with the GPU's work", f"{(time.perf_counter() - started) * 1e3 / TIMES:.3f} ms wall")


def main() -> None:
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "CUDA", torch.version.cuda)
    work = Work()
    figures(work)
    events(work)
    fingerprints()
    flushes(work)
    refusals()


if __name__ == "__main__":
    main()
