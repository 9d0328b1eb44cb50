"""Decides whether the C library keeps the pages of evicted tensors or returns them to the system.

This is for sessions without the native extension, which has a heap of its own (`native_heap.py`).

By default glibc returns a freed block of some MB if it happens to be at the heap's end, and gets fresh pages
for the next one, each of which the system clears at the cost of a page fault: a fifth of a ResNet's step at
half its peak. It keeps blocks elsewhere in the heap, and the resident set ends up far above the tensors'
bytes.

Here the heap keeps its pages, up to half of the budget beyond the tensors: when the resident set exceeds
that, not counting the process's memory other than tensors, all free pages are returned at once. That keeps it
below a plain run's at reasonable budgets, and costs a few percent of a step. Without the bound evictions
fragment the heap, and the resident set can end above the plain run's. If the machine is short of memory (or
always, if requested), the bound is an eighth of the budget.

This uses `mallopt` and `malloc_trim`: elsewhere than with glibc nothing happens. Limits that the user has set
by environment variable are not changed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from dtrrun.settings import When

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
NO_LIMIT = (1 << 31) - 1
MMAP_THRESHOLD, TRIM_THRESHOLD = 32 << 20, 64 << 20  # the maxima of glibc's own adjustment on 64 bits
SCARCE_SHIFT = 3  # fractions of the budget: free pages kept, and when memory is short
SLACK_SHIFT, SHORT_SLACK_SHIFT = 1, 3  # of the budget: free pages that are kept, and where memory is short
PERIOD = 0.005  # seconds between two checks, each of which takes some 20 µs
SCARCE_PERIOD = 0.05  # between two checks of the machine's memory, which take longer
PAGE = os.sysconf("SC_PAGE_SIZE")


class Heap:
    """Monitors the resident set of this process."""

    def __init__(self, mode: When) -> None:
        self._mode = mode
        self._library: Any = None
        self._base = 0  # bytes of the process other than tensors
        self._next_look = self._next_scarce_look = 0.0
        self._scarce = mode == "always"
        self.trims = 0

    def install(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version") or not Path("/proc/self/statm").exists():
            return
        self._library = library
        self._base = resident_set()
        if not _set_by_user(os.environ):
            library.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
            library.mallopt(M_TRIM_THRESHOLD, NO_LIMIT)

    def remove(self) -> None:
        if self._library is not None and not _set_by_user(os.environ):
            self._library.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        self._library = None

    def check(self, tensor_bytes: int, limit: int) -> None:
        """Return the free pages if the resident set is too large for tensors within `limit`."""
        if self._library is None or self._mode == "never":
            return
        now = monotonic()
        if now < self._next_look:
            return
        self._next_look = now + PERIOD
        resident = resident_set()
        self._base = min(self._base, resident - tensor_bytes)
        if resident - self._base <= limit + (limit >> SHORT_SLACK_SHIFT):
            return
        if self._mode == "auto" and now >= self._next_scarce_look:
            self._next_scarce_look = now + SCARCE_PERIOD
            self._scarce = memory_is_short()
        shift = SHORT_SLACK_SHIFT if self._scarce else SLACK_SHIFT
        if resident - self._base > limit + (limit >> shift):
            self._library.malloc_trim(0)
            self.trims += 1
            self._base = resident_set() - tensor_bytes  # includes loaded libraries and workspaces


def resident_set() -> int:
    """Return this process's private pages, in bytes."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * PAGE


def resident_peak() -> int:
    """Return the peak of this process's memory in bytes (`VmHWM`), or 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        # Linux's `ru_maxrss` includes memory of the process that forked this one.
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
    return 0


def memory_is_short() -> bool:
    """Return whether the machine, or the container, has little memory left."""
    with suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        if available < total >> SCARCE_SHIFT:
            return True
    with suppress(OSError, ValueError):  # "max" if there is no limit
        limit, used = (int(Path("/sys/fs/cgroup", f"memory.{n}").read_text()) for n in ("max", "current"))
        return limit - used < limit >> SCARCE_SHIFT
    return False


def _set_by_user(environ: Any) -> bool:
    return (
        "MALLOC_TRIM_THRESHOLD_" in environ
        or "MALLOC_MMAP_THRESHOLD_" in environ
        or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    )
