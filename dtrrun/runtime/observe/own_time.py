"""dtrrun's own time in many brief pieces: what C++ has measured of it, as a part of the wall time.

On a busy machine, a thread runs for some milliseconds and then waits for a processor. Long pieces of time
include their share of that. A brief piece is hardly ever interrupted, but then by a hundred times its own
length, so in C++ brief pieces are counted without such waits. Here they get their share of those that the
thread had.

What dtrrun does also slows down what comes after it: PyTorch's and Python's code and data, which it has
displaced from the caches, have to be read again. This cannot be seen in a running program. But the
program displaces dtrrun's code and data likewise, and what that costs can be seen: some operators of a
kind are handled much more quickly than the rest (`Stopwatch::cold_ns`). What the one waits for is about
what the other does. `DISPLACED` is the factor, which includes the longer way through PyTorch's
dispatcher; it is fitted to the programs of `python -m tests.bench said`. For dtrrun's functions in
Python, there is only a share of the time itself.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

DISPLACED = 1.1
DISPLACED_BY_PYTHON = 0.65
MOST = 50.0
"""The largest stretch: a thread that has hardly run in a period has not measured anything."""


class ProcessorWait:
    """How long the thread that makes this has been ready to run while others had the processor."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):  # not Linux, or its kernel does not count it
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def ns(self) -> int:
        """Return it, in ns; 0 if the system does not tell."""
        with suppress(OSError, ValueError, IndexError):
            if self._file is not None:
                return int(os.pread(self._file, 128, 0).split()[1])
        return 0


class OwnTime:
    """Sums of brief pieces, stretched. `add` is called with running totals, at the ends of periods."""

    def __init__(self, pieces: int) -> None:
        """pieces: how many sums there are."""
        self._lock = threading.RLock()
        self._before = (0, 0)
        self._counted = [0] * pieces
        self._sums = [0.0] * pieces

    def add(self, wall_ns: int, waited_ns: int, counted: tuple[int, ...]) -> list[int]:
        """Return the sums up to now.

        wall_ns, waited_ns: since the session began. counted: the pieces' totals.
        """
        with self._lock:
            wall, waited = wall_ns - self._before[0], waited_ns - self._before[1]
            if wall > 0:
                stretch = min(wall / max(wall - max(waited, 0), 1), MOST)
                for place, total in enumerate(counted):
                    self._sums[place] += stretch * (total - self._counted[place])
                    self._counted[place] = total
                self._before = wall_ns, waited_ns
            return [round(one) for one in self._sums]
