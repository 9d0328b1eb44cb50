"""The mechanism that DTR relies on: emptying and refilling the storage under the program's tensors.

The program's tensors must keep their identity while their memory is freed and restored.
`UntypedStorage._swap_data_ptr_` (PyTorch 2.13, absent in 2.12) moves the memory of a recomputed storage to
the old one, without a copy. The native extension can do so with any version. If there is neither, the old
storage is resized and copied into. No longer needed once PyTorch has a public swap.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

own_storage_of = torch._C.TensorBase.untyped_storage
"""The unpatched method: `escapes` patches that of torch.Tensor."""
_storage_of: Any = own_storage_of
_own_swap: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
_swap: Any = _own_swap
address_of: Any = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
resize: Any = torch._C.StorageBase.resize_  # type: ignore[attr-defined]  # unpatched too: see `resizes`

CPU_ROUNDING = 64  # whole cache lines
CUDA_ROUNDING = 512  # kMinBlockSize of c10/core/AllocatorConfig.h

MASK = -CPU_ROUNDING
OURS: int | None = None
"""Index of the session's CUDA device; None for any, while no session is bound to one."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage. It may be another object each time: tell storages by their keys."""
    storage: torch.UntypedStorage = _storage_of(tensor)
    return storage


def use_objects(function: Callable[[torch.Tensor], torch.UntypedStorage] | None) -> None:
    """Choose what `storage_of` calls; None: PyTorch's method."""
    global _storage_of
    _storage_of = own_storage_of if function is None else function


def use_device(rounding: int, index: int | None) -> None:
    """Round as the allocator of the session's device does. index: of a CUDA device, once known."""
    global MASK, OURS
    MASK, OURS = -rounding, index
    place_of.cache_clear()


def rounded(nbytes: int) -> int:
    """Return the bytes as rounded by PyTorch's allocator on the session's device."""
    return (nbytes - MASK - 1) & MASK


def size_of(storage: torch.UntypedStorage) -> int:
    """Return m(t): the bytes that a storage takes."""
    return rounded(storage.nbytes())


def holds(storage: torch.UntypedStorage, nbytes: int) -> bool:
    """Return whether a storage takes `nbytes` bytes."""
    return rounded(storage.nbytes()) == nbytes


@functools.cache
def type_of(device: torch.device) -> str:
    """Return a device's type. Asking the device each time is slow: PyTorch writes it to a stream."""
    return device.type


@functools.cache
def place_of(device: torch.device) -> str:
    """Return a device's type, or `cuda:1` if it is not the session's device."""
    if device.type == "cuda" and OURS is not None and device.index not in (None, OURS):
        return str(device)
    return device.type


def device_type_of(storage: torch.UntypedStorage) -> str:
    return place_of(storage.device)


def empty(storage: torch.UntypedStorage) -> None:
    """Free the memory at once. Tensors over the storage keep sizes, strides and identity."""
    _empty(storage)


def is_empty(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage has no memory."""
    return _is_empty(storage)


def _empty_by_resize(storage: torch.UntypedStorage) -> None:
    resize(storage, 0)


def _has_no_bytes(storage: torch.UntypedStorage) -> bool:
    return storage.nbytes() == 0


_empty: Callable[[torch.UntypedStorage], None] = _empty_by_resize
_is_empty: Callable[[torch.UntypedStorage], bool] = _has_no_bytes


def use_placeholders(native: Any) -> None:
    """Let evicted storages keep their sizes, and point where nobody can read (`native/placeholders.h`); None:
    they are resized to nothing."""
    global _empty, _is_empty
    _empty = _empty_by_resize if native is None else native.evict
    _is_empty = _has_no_bytes if native is None else native.is_evicted


def refill_by_swap(storage: Any, source: torch.UntypedStorage) -> None:
    """Move `source`'s memory to the emptied `storage`; `source` is empty afterwards."""
    _swap(storage, source)


def refill_by_copy(storage: Any, source: torch.UntypedStorage) -> None:
    """Copy `source` into the emptied `storage`; both are allocated temporarily."""
    try:
        resize(storage, 0)  # or else it copies what the storage held before
        resize(storage, source.nbytes())
        storage.copy_(source)
    except BaseException:  # an interrupt may come when it has its size but not its content
        resize(storage, 0)
        raise


refill = refill_by_copy if _swap is None else refill_by_swap
REFILL_COPIES = _swap is None
"""Whether `refill` temporarily needs the storage's size a second time."""
_wants_copies = False


def use_refill(*, copy: bool) -> None:
    """Choose how storages are refilled (tests cover both)."""
    global _wants_copies
    _wants_copies = copy
    _choose_refill()


def use_swap(function: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] | None) -> None:
    """Choose what swaps the memory of two storages if PyTorch has no method for it; None: nothing does."""
    global _swap
    _swap = _own_swap or function
    _choose_refill()


def _choose_refill() -> None:
    global refill, REFILL_COPIES
    REFILL_COPIES = _wants_copies or _swap is None
    refill = refill_by_copy if REFILL_COPIES else refill_by_swap


def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a new, uninitialised storage of `nbytes`."""
    return torch.UntypedStorage(nbytes, device=device)


def is_ours(storage: torch.UntypedStorage) -> bool:
    """Return whether only PyTorch's allocator owns the memory (not NumPy, a file, or another process)."""
    return storage.resizable() and not (type_of(storage.device) == "cpu" and storage.is_shared())


def span_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return the start and end address of a storage that is in memory."""
    start = address_of(storage)
    return start, start + storage.nbytes()


def mapping_of(span: tuple[int, int]) -> str:
    """Return what kind of memory is at these addresses of this process: "file" if it is mapped privately from
    a file, "private" if it is anonymous, "shared" if other processes may write to it, "" if unknown."""
    found = set()
    with suppress(OSError, ValueError, IndexError), open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, _offset, _device, inode, *_ = line.split(maxsplit=5)
            first, last = (int(address, 16) for address in addresses.split("-"))
            if first < span[1] and span[0] < last:
                kind = "private" if inode == "0" else "file"
                found.add(kind if permissions[3] == "p" else "shared")
    return found.pop() if len(found) == 1 else ""


def is_held(storage: torch.UntypedStorage, times: int = 0) -> bool:
    """Return whether Python code holds this storage, besides its tensors and one variable of the caller.

    times: how often the caller holds it otherwise.
    """
    return sys.getrefcount(storage) > _references_beside_tensors() + times


@functools.cache
def _references_beside_tensors() -> int:
    """Return what `is_held` counts for a storage that only a tensor has; PyTorch's versions differ."""

    def count(storage: torch.UntypedStorage) -> int:
        return sys.getrefcount(storage)

    tensor = torch.frombuffer(bytearray(4), dtype=torch.uint8)
    storage = own_storage_of(tensor)
    return count(storage)


def checksum(storage: torch.UntypedStorage) -> int:
    """Return a checksum of the content of a storage in host memory."""
    return _checksum(storage)


def _crc(storage: torch.UntypedStorage) -> int:
    nbytes = storage.nbytes()
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address_of(storage))) if nbytes else 0


_checksum: Callable[[torch.UntypedStorage], int] = _crc


def use_checksum(function: Callable[[torch.UntypedStorage], int] | None) -> None:
    """Choose what computes checksums; None: the C library's CRC. Both may be used in one process, but not for
    one storage."""
    global _checksum
    _checksum = function or _crc
