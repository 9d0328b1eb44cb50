"""Decides how much freed memory stays with the process.

PyTorch's allocator for the CPU is replaced while the session is on (`dtrrun/native/heap.h`). Blocks that the
replacement has allocated may outlive the session.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from dtrrun.runtime.patches.registry import lack
from dtrrun.settings import When

WITHOUT = (
    "nothing is evicted where the system refuses memory or for storages that no operator makes, and freed "
    "memory may stay with the process"
)

LEAST_SLACK = 16 << 20
"""In bytes. A program of small tensors uses memory outside of the heap, which leaves little room there for
the phase that follows. Its pages would be given back, and cleared again for each tensor: small convolutions
took 1.35 times as long within their peak as without dtrrun, and 1.12 times with this slack."""
SLACK_SHIFT = 3
"""Or an eighth of the budget, if that is more. In 6 steps of the DenseNet example, in half of its peak, there
are 160,000 page faults with a quarter, 200,000 with an eighth, and 380,000 if nothing is kept beyond the
budget."""


class Heap:
    """The blocks of tensors, and the free pages, of this process."""

    def __init__(self, mode: When, native: ModuleType) -> None:
        self._mode, self._native = mode, native

    def install(self) -> None:
        self._native.cap_heap(None)
        if not self._native.use_heap(True):
            lack("allocator on a CPU that can be replaced", WITHOUT)

    def remove(self) -> None:
        self._native.use_heap(False)

    def check(self, tensor_bytes: int, limit: int) -> None:
        """Give back the free pages in excess of what tensors within `limit` need."""
        if self._mode == "never":
            return
        blocks, *_ = self._native.heap_figures()
        elsewhere = max(0, tensor_bytes - blocks)  # small tensors, and those from before the session
        slack = max(limit >> SLACK_SHIFT, LEAST_SLACK) if self._mode == "auto" else 0
        self._native.cap_heap(max(0, limit + slack - elsewhere))


def resident_peak() -> int:
    """Return the peak of this process's memory in bytes (`VmHWM`), or 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        # Linux's `ru_maxrss` includes memory of the parent that forked this process.
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
    return 0
