"""Fingerprints of storages on a GPU: sums that the GPU computes, and nobody waits for.

A storage is read in parts, as rows of 32-bit integers. The columns are added up in 64 bits, and then their
sums, each times its factor. Integers wrap, so the order of additions does not matter. This is done twice,
with rows of different widths: if values change places in a part, it is missed only if they stay in the same
column both times. Each part multiplies the sums of those before it.

Memory is short when something is evicted, so what this takes is allocated once. PyTorch makes a copy of
64-bit integers of what it adds up, twice as large as the storage: hence parts, and a place for their copies.
And if it divides a column among blocks of threads (from 1024 rows on), it needs up to 32 MiB for their
results: hence few rows, which are long.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

WIDTHS = (1 << 14, (1 << 14) - 3)
PART = 128 * WIDTHS[0]
"""The integers that are added up at once. Their copy takes 17 MB."""
SLOTS = 1 << 14
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

    def __init__(self, device: torch.device, slots: int = SLOTS) -> None:
        self.device = device
        self._free = list(range(slots))
        with self._stream():
            self._table = torch.zeros(slots, len(WIDTHS), dtype=torch.int64, device=device)
            self._part = torch.zeros(PART, dtype=torch.int64, device=device)
            self._columns = [torch.zeros(width, dtype=torch.int64, device=device) for width in WIDTHS]
            self._added = [torch.zeros(width, dtype=torch.int64, device=device) for width in WIDTHS]
            self._factors = [
                torch.tensor([_factor(k) for k in range(width)], device=device) for width in WIDTHS
            ]

    def has_room(self, spare: int = 0) -> bool:
        """Return whether there is a slot for another fingerprint, and `spare` more."""
        return len(self._free) > spare

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
        for number, part in enumerate(values.split(PART)):
            copied = self._part[: len(part)].copy_(part)
            for column, added in zip(self._columns, self._added, strict=True):
                _add_up(copied, column if number == 0 else added)
                if number > 0:
                    torch.add(added, column, alpha=_factor(0), out=column)
        for column, factors, place in zip(self._columns, self._factors, self._table[found.slot], strict=True):
            torch.sum(column.mul_(factors), 0, out=place)
        return found

    def read(self) -> list[list[int]]:
        """Wait for the GPU, and return the figures of each slot."""
        with self._stream():
            # Not by the patched method, which would enter the table in the ledger.
            figures: list[list[int]] = torch._C.TensorBase.tolist(self._table)
        return figures


def _add_up(values: torch.Tensor, column: torch.Tensor) -> None:
    """Write the sums of the columns, in rows as long as `column`."""
    width = len(column)
    whole = len(values) - len(values) % width
    if whole:
        torch.sum(values[:whole].view(-1, width), 0, out=column)
    else:
        column.zero_()
    if whole < len(values):
        column[: len(values) - whole].add_(values[whole:])


def _factor(column: int) -> int:
    """Return an odd number of 64 bits, as a signed one."""
    found = (2 * column + 1) * FACTOR % (1 << 64)
    return found - (1 << 64) if found >> 63 else found
