"""Decides how much freed memory stays with the process, if the native extension has a heap for tensors.

PyTorch's allocator for the CPU is replaced as long as the session is on (`dtrrun/native/heap.h`). What it has
allocated may live longer. Where there is no extension, the C library is steered from outside (`heap.py`).
"""

from __future__ import annotations

from types import ModuleType

from dtrrun.settings import When

SLACK_SHIFT = 3
"""An eighth of the budget. In 6 steps of the DenseNet example inside half of its peak there are 160,000 page
faults with a quarter, 200,000 with an eighth, and 380,000 if nothing is kept beyond the budget."""


class NativeHeap:
    """Tensors' blocks, and free pages, of this process."""

    def __init__(self, mode: When, native: ModuleType) -> None:
        self._mode, self._native = mode, native

    def install(self) -> None:
        self._native.cap_heap(None)
        self._native.use_heap(True)

    def remove(self) -> None:
        self._native.use_heap(False)

    def check(self, tensor_bytes: int, limit: int) -> None:
        """Return the free pages that are too many for tensors within `limit`."""
        if self._mode == "never":
            return
        blocks, *_ = self._native.heap_figures()
        elsewhere = max(0, tensor_bytes - blocks)  # small tensors, and those from before the session
        slack = limit >> SLACK_SHIFT if self._mode == "auto" else 0
        self._native.cap_heap(max(0, limit + slack - elsewhere))
