"""What the C library does with the memory of evicted tensors: keep its pages, or return them to the system.

By default glibc returns a freed block of some MB when it happens to lie at the heap's end, and gets fresh
pages for the next one, each of which the system clears at the price of a fault: a fifth of a ResNet's step
inside half its peak. Blocks further down it keeps, and the resident set ends far above the tensors' bytes.

Here the heap keeps its pages, but no more than half of the budget's worth beyond the tensors: whenever the
resident set is found to be more, above what the process has beside its tensors, all free pages go back at
once. That keeps it below a plain run's at budgets worth setting, and costs a few percent of a step. Without
that bound evictions tear holes into the heap, and the resident set can end above the plain run's. Where the
machine has little memory left (or always, if asked to), an eighth of the budget is the bound.

Through `mallopt` and `malloc_trim`: glibc only, elsewhere nothing happens. Nor are limits changed that the
user has set by environment variable.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from dtrrun.settings import ReturnMemory

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
NO_LIMIT = (1 << 31) - 1
MMAP_THRESHOLD, TRIM_THRESHOLD = 32 << 20, 64 << 20  # where glibc's own adjustment ends on 64 bits
SCARCE_SHIFT = 3  # memory is short when less than an eighth of the machine is available
SLACK_SHIFT, SHORT_SLACK_SHIFT = 1, 3  # of the budget: free pages that are kept, and where memory is short
PERIOD = 0.005  # seconds between two looks, each of which takes some 20 µs
SCARCE_PERIOD = 0.05  # between two looks at the machine's memory, which take longer
PAGE = os.sysconf("SC_PAGE_SIZE")


class Heap:
    """Watches the resident set of this process."""

    def __init__(self, mode: ReturnMemory) -> None:
        self._mode = mode
        self._library: Any = None
        self._base = 0  # bytes that the process holds beside its tensors
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
        """Return the free pages if the resident set is more than it should be for tensors within `limit`."""
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
            self._base = resident_set() - tensor_bytes  # libraries have been loaded, workspaces made


def resident_set() -> int:
    """This process's private pages, in bytes."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * PAGE


def resident_peak() -> int:
    """The most that this process has had in memory, in bytes: what `VmHWM` says; 0 where nothing says so."""
    with suppress(OSError, ValueError, IndexError):
        # Linux's `ru_maxrss` also has what the process held that forked us.
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
    return 0


def memory_is_short() -> bool:
    """Whether the machine, or the container that this runs in, has little left."""
    with suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        if available < total >> SCARCE_SHIFT:
            return True
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = (int(Path("/sys/fs/cgroup", f"memory.{n}").read_text()) for n in ("max", "current"))
        return limit - used < limit >> SCARCE_SHIFT
    return False


def _set_by_user(environ: Any) -> bool:
    return (
        "MALLOC_TRIM_THRESHOLD_" in environ
        or "MALLOC_MMAP_THRESHOLD_" in environ
        or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    )
