"""What mapping memory costs on a GPU, alone and beside kernels, and whether a page at two addresses is one.

Calls the driver as PyTorch's expandable segments do: cuMemCreate, cuMemMap and cuMemSetAccess, then
cuMemUnmap and cuMemRelease. An allocator that maps pages at several addresses depends on the answers.
"""

import ctypes
import statistics
import time
from collections.abc import Callable

import torch

MIB = 1 << 20
SIZES_MIB = (2, 20)
MAPPED_MIB = 400
TIMES = 5

Handle = ctypes.c_uint64
Address = ctypes.c_uint64


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


ON_DEVICE = Location(1, 0)  # CU_MEM_LOCATION_TYPE_DEVICE, 0
PINNED = Properties(1, 0, ON_DEVICE)  # CU_MEM_ALLOCATION_TYPE_PINNED
READ_AND_WRITE = Access(ON_DEVICE, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class Driver:
    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: status {status}")

    def reserve(self, nbytes: int) -> int:
        at = Address()
        size = ctypes.c_size_t(nbytes)
        self.call("cuMemAddressReserve", ctypes.byref(at), size, ctypes.c_size_t(0), Address(0), Address(0))
        return at.value

    def create(self, nbytes: int) -> int:
        made = Handle()
        arguments = (ctypes.byref(made), ctypes.c_size_t(nbytes), ctypes.byref(PINNED), ctypes.c_uint64(0))
        self.call("cuMemCreate", *arguments)
        return made.value

    def map(self, at: int, nbytes: int, handle: int) -> None:
        size, offset = ctypes.c_size_t(nbytes), ctypes.c_size_t(0)
        self.call("cuMemMap", Address(at), size, offset, Handle(handle), ctypes.c_uint64(0))

    def allow(self, at: int, nbytes: int) -> None:
        size, count = ctypes.c_size_t(nbytes), ctypes.c_size_t(1)
        self.call("cuMemSetAccess", Address(at), size, ctypes.byref(READ_AND_WRITE), count)

    def unmap(self, at: int, nbytes: int) -> None:
        self.call("cuMemUnmap", Address(at), ctypes.c_size_t(nbytes))

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", Handle(handle))


class Seen:
    """Memory at an address, as PyTorch's kernels take it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes // 4,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.as_tensor(Seen(address, nbytes), device="cuda")


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def cost_of_maps(driver: Driver, mib: int, *, busy: Callable[[], None] | None) -> None:
    """Print the µs of each call for one handle, idle or beside kernels."""
    nbytes, count = mib * MIB, MAPPED_MIB // mib
    found: dict[str, list[float]] = {}
    for _ in range(TIMES):
        base = driver.reserve(nbytes * count)
        torch.cuda.synchronize()
        if busy is not None:
            busy()
        handles: list[int] = []
        took = {
            "create": timed(lambda into=handles: into.extend(driver.create(nbytes) for _ in range(count))),
            "map": timed(
                lambda base=base, made=handles: [
                    driver.map(base + n * nbytes, nbytes, handle) for n, handle in enumerate(made)
                ]
            ),
            "set access (one call)": timed(lambda base=base: driver.allow(base, nbytes * count)),
            "unmap": timed(lambda base=base: [driver.unmap(base + n * nbytes, nbytes) for n in range(count)]),
            "map again": timed(
                lambda base=base, made=handles: [
                    driver.map(base + n * nbytes, nbytes, handle) for n, handle in enumerate(made)
                ]
            ),
            "set access again": timed(lambda base=base: driver.allow(base, nbytes * count)),
            "unmap in one call": timed(lambda base=base: driver.unmap(base, nbytes * count)),
            "release": timed(lambda made=handles: [driver.release(handle) for handle in made]),
        }
        still_busy = busy is not None and not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        for name, us in took.items():
            found.setdefault(name, []).append(us / count)
    medians = ", ".join(f"{name} {statistics.median(us):.1f}" for name, us in found.items())
    beside = "idle" if busy is None else f"beside kernels (which still ran afterwards: {still_busy})"
    print(f"handles of {mib} MiB, {beside}, µs per handle: {medians}", flush=True)


def one_page_twice(driver: Driver) -> None:
    """Write through one address and read through another, kernel after kernel."""
    nbytes = 20 * MIB
    before, _ = torch.cuda.mem_get_info()
    handle = driver.create(nbytes)
    first, second = driver.reserve(nbytes), driver.reserve(nbytes)
    for at in (first, second):
        driver.map(at, nbytes, handle)
        driver.allow(at, nbytes)
    after, _ = torch.cuda.mem_get_info()
    a, b = tensor_at(first, nbytes), tensor_at(second, nbytes)
    wrong = 0
    for n in range(2000):
        (a if n % 2 else b).fill_(float(n))
        wrong += not bool(((b if n % 2 else a)[:: 1 << 16] == n).all())
    for n in range(200):  # many kernels in a row, without the host in between
        a.fill_(0.0)
        b.add_(float(n))
        a.mul_(2.0)
        wrong += bool((b != 2.0 * n).any())
    counted = (before - after) / MIB
    print(f"one page at two addresses: {wrong} wrong of 2200; the driver counts {counted:.0f} of 20 MiB")


def main() -> None:
    torch.cuda.init()
    x = torch.randn(8192, 8192, device="cuda")
    torch.mm(x, x)
    torch.cuda.synchronize()
    driver = Driver()
    for mib in SIZES_MIB:
        cost_of_maps(driver, mib, busy=None)
        cost_of_maps(driver, mib, busy=lambda: [torch.mm(x, x) for _ in range(8)] and None)
    one_page_twice(driver)


if __name__ == "__main__":
    main()
