"""The mechanism that DTR relies on: emptying and refilling the storage under the program's tensors.

The program's tensors must keep their identity while their memory is freed and restored. The native extension
moves a recomputed storage's memory into the emptied one, without a copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

own_storage_of = torch._C.TensorBase.untyped_storage
"""The unpatched method: `escapes` patches that of torch.Tensor."""
_storage_of: Any = own_storage_of
address_of: Any = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
bytes_of: Any = torch._C.StorageBase.nbytes  # type: ignore[attr-defined]  # and see `escapes`
resize: Any = torch._C.StorageBase.resize_  # type: ignore[attr-defined]  # unpatched too: see `resizes`

CPU_ROUNDING = 64  # whole cache lines
CUDA_ROUNDING = 512  # kMinBlockSize of c10/core/AllocatorConfig.h

MASK = -CPU_ROUNDING
OURS: tuple[int, ...] = ()
"""Indexes of the session's CUDA devices; none while no session is bound to one."""


def _keeps_to_itself(_index: int) -> bool:
    return False


_joins: Callable[[int], bool] = _keeps_to_itself


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage. It may be another object each time: compare storages by their keys."""
    storage: torch.UntypedStorage = _storage_of(tensor)
    return storage


def use_objects(function: Callable[[torch.Tensor], torch.UntypedStorage] | None) -> None:
    """Set the function that `storage_of` calls; None: PyTorch's method."""
    global _storage_of
    _storage_of = own_storage_of if function is None else function


def use_device(rounding: int, *indexes: int, joins: Callable[[int], bool] = _keeps_to_itself) -> None:
    """Round as the allocator of the session's device does.

    indexes: of the session's CUDA devices, once known. joins: called with that of another one; lets the
    session use it, too, or returns False.
    """
    global MASK, OURS, _joins
    MASK, OURS, _joins = -rounding, indexes, joins
    place_of.cache_clear()


def rounded(nbytes: int) -> int:
    """Return the bytes as rounded by PyTorch's allocator on the session's device."""
    return (nbytes - MASK - 1) & MASK


def size_of(storage: torch.UntypedStorage) -> int:
    """Return m(t): the bytes that a storage takes."""
    return rounded(bytes_of(storage))


def holds(storage: torch.UntypedStorage, nbytes: int) -> bool:
    """Return whether a storage takes `nbytes` bytes."""
    return rounded(bytes_of(storage)) == nbytes


@functools.cache
def type_of(device: torch.device) -> str:
    """Return a device's type. Asking the device each time is slow: PyTorch formats it with a stream."""
    return device.type


@functools.cache
def place_of(device: torch.device) -> str:
    """Return a device's type, or `cuda:1` if it is not one of the session's devices."""
    if device.type != "cuda" or not OURS or device.index is None or device.index in OURS:
        return device.type
    return device.type if _joins(device.index) else str(device)


def device_type_of(storage: torch.UntypedStorage) -> str:
    return place_of(storage.device)


def use_extension(native: Any) -> None:
    """Use this extension to empty, refill and hash storages, and to search objects."""
    global _native
    _native = native


_native: Any = None


def instances(objects: list[Any], classes: tuple[type, ...]) -> list[Any]:
    """Return the objects whose type is one of these classes, or derived from one: of a million, in 5 ms.

    isinstance() would ask lazy proxies for their `__class__`.
    """
    if _native is None:
        return [one for one in objects if issubclass(type(one), classes)]
    found: list[Any] = _native.instances(objects, classes)
    return found


def empty(storage: torch.UntypedStorage) -> None:
    """Free the memory at once. Tensors over the storage keep sizes, strides and identity.

    The storage keeps its size. On a CPU, it points to unreadable addresses (`native/placeholders.h`).
    """
    _native.evict(storage)


def is_empty(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage has no memory."""
    found: bool = _native.is_evicted(storage)
    return found


def is_for_shapes(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage unknown to the session has never had memory: it is there for shapes only.

    PyTorch's FakeTensor has such a storage. It claims to be on a CPU. Its size may be symbolic, and asking
    for its value would make the program depend on it.
    """
    found: bool = _native.is_for_shapes(storage)
    return found


def refill(storage: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
    """Move `source`'s memory to the emptied `storage`; `source` is empty afterwards."""
    _native.swap(storage, source)


def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a new, uninitialised storage of `nbytes`."""
    return torch.UntypedStorage(nbytes, device=device)


def is_ours(storage: torch.UntypedStorage) -> bool:
    """Return whether only PyTorch's allocator owns the memory (not NumPy, a file, or another process)."""
    return storage.resizable() and not (type_of(storage.device) == "cpu" and storage.is_shared())


def span_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return the start and end address of a storage that is in memory."""
    start = address_of(storage)
    size: int = bytes_of(storage)
    return start, start + size


def mapping_of(span: tuple[int, int]) -> str:
    """Return the kind of memory at these addresses of this process: "file" if it is mapped privately from a
    file, "private" if it is anonymous, "shared" if other processes may write to it, "" if unknown."""
    found = set()
    with suppress(OSError, ValueError, IndexError), open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, _offset, _device, inode, *_ = line.split(maxsplit=5)
            first, last = (int(address, 16) for address in addresses.split("-"))
            if first < span[1] and span[0] < last:
                kind = "private" if inode == "0" else "file"
                found.add(kind if permissions[3] == "p" else "shared")
    return found.pop() if len(found) == 1 else ""


from_workers: set[int] = set()
"""Addresses of memory received from workers of a `DataLoader`, until a session asks."""
MOST_FROM_WORKERS = 10_000  # if a session never asks


def note_from_worker(storage: torch.UntypedStorage) -> None:
    """Note a storage that a worker of a `DataLoader` has made and shares."""
    if len(from_workers) >= MOST_FROM_WORKERS:
        from_workers.clear()
    from_workers.add(address_of(storage))


def is_from_worker(span: tuple[int, int]) -> bool:
    """Return whether a worker of a `DataLoader` made the memory at these addresses. Ask once."""
    found = span[0] in from_workers
    from_workers.discard(span[0])
    return found


def is_held(storage: torch.UntypedStorage, times: int = 0) -> bool:
    """Return whether Python code holds this storage, besides its tensors and one variable of the caller.

    times: the number of other references that the caller holds.
    """
    return sys.getrefcount(storage) > _references_beside_tensors() + times


def _references_beside_tensors() -> int:
    """Return the count in `is_held` for a storage held only by a tensor.

    PyTorch versions differ. So do two moments: while Dynamo watches frames, a call adds a reference.
    """

    def count(storage: torch.UntypedStorage) -> int:
        return sys.getrefcount(storage)

    storage = own_storage_of(_held_by_nobody())
    return count(storage)


@functools.cache
def _held_by_nobody() -> torch.Tensor:
    return torch.frombuffer(bytearray(4), dtype=torch.uint8)


def checksum(storage: torch.UntypedStorage) -> int:
    """Return a checksum of the content of a storage in host memory."""
    found: int = _native.checksum(storage)
    return found
