"""Fingerprints of storages on a GPU: sums that the GPU computes, and nobody waits for.

A storage is read as rows of 32-bit integers. The columns are added up, and then their sums, each times its
factor. Integers wrap, so the order of additions does not matter. This is done twice, with rows of 1024 and of
1021: if values change places, it is missed only if they stay in the same column both times.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

WIDTHS = (1024, 1021)
SLOTS = 4096
FACTOR = 0x9E3779B97F4A7C15  # odd, so that no change of one value is lost


class Sum:
    """The fingerprint of one storage. Gives its slot back when it dies."""

    __slots__ = ("_free", "slot")

    def __init__(self, free: list[int]) -> None:
        self._free = free
        self.slot = free.pop()

    def __del__(self) -> None:
        self._free.append(self.slot)


class Sums:
    """The fingerprints on one GPU. Use it where operators run on plain tensors (`guards.aside`).

    They are computed on the default stream: whatever can be evicted belongs to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free = list(range(SLOTS))
        with self._stream():
            self._table = torch.zeros(SLOTS, len(WIDTHS), dtype=torch.int64, device=device)
            self._columns = [torch.zeros(width, dtype=torch.int64, device=device) for width in WIDTHS]
            self._factors = [
                torch.tensor([_factor(k) for k in range(width)], device=device) for width in WIDTHS
            ]

    def has_room(self) -> bool:
        return bool(self._free)

    def of(self, storage: torch.UntypedStorage, nbytes: int) -> Sum:
        """Start to compute the fingerprint of the first `nbytes` bytes. There must be room."""
        with self._stream():
            return self._of(storage, nbytes)

    def _stream(self) -> AbstractContextManager[object]:
        if self.device.type == "cpu":
            return nullcontext()
        main = torch.cuda.default_stream(self.device)
        return nullcontext() if torch.cuda.current_stream() == main else torch.cuda.stream(main)

    def _of(self, storage: torch.UntypedStorage, nbytes: int) -> Sum:
        dtype = torch.uint8 if nbytes % 4 else torch.int32
        count = nbytes // dtype.itemsize
        values = torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, (count,), (1,))
        found = Sum(self._free)
        for column, factors, place in zip(self._columns, self._factors, self._table[found.slot], strict=True):
            width = len(column)
            whole = count - count % width
            if whole:
                torch.sum(values[:whole].view(-1, width), 0, dtype=torch.int64, out=column)
            else:
                column.zero_()
            column[: count - whole].add_(values[whole:])
            torch.sum(column.mul_(factors), 0, out=place)
        return found

    def read(self) -> list[list[int]]:
        """Wait for the GPU, and return the figures of each slot."""
        with self._stream():
            # Not by the patched method, which would enter the table in the ledger.
            figures: list[list[int]] = torch._C.TensorBase.tolist(self._table)
        return figures


def _factor(column: int) -> int:
    """Return an odd number of 64 bits, as a signed one."""
    found = (2 * column + 1) * FACTOR % (1 << 64)
    return found - (1 << 64) if found >> 63 else found
