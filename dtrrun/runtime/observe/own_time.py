"""dtrrun's own time: what has been measured of it, as a part of the wall time, and what can't be measured.

On a busy machine, a thread runs for some milliseconds and then waits for a processor. A brief piece of work
is hardly ever interrupted, but then by a hundred times its own length. So dtrrun's brief pieces are counted
without such waits, and here get their share of all those that the thread had.

What dtrrun does also costs time that it cannot see in a running program:

- the longer way through PyTorch's dispatcher, to dtrrun and back. It grows with the arguments and the
  results, as does what C++ does when nothing delays it: `UNSEEN` is a share of that.
- what comes after dtrrun is slower: PyTorch's and Python's code and data, which it has displaced from the
  caches, have to be read again. But the program displaces dtrrun's code and data likewise, and what that
  costs can be seen: the same operator is handled much more quickly at some times than at most others
  (`Stopwatch::cold_ns`). What the one waits for is about what the other does: `DISPLACED` is the factor.
- the beginnings and ends of dtrrun's functions in Python: `UNSEEN_PYTHON` is a share of what they measure.

`python -m tests.bench said` compares the result with what programs lose.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

UNSEEN = 0.2
DISPLACED = 1.1
UNSEEN_PYTHON = 0.3
MOST = 50.0
"""The largest stretch: a thread that has hardly run in a period has not measured anything."""


def unseen_ns(own: float, cold: float, in_python: float) -> int:
    """Return what dtrrun costs besides what it has measured, in ns.

    own: what C++ has measured. cold: the part of it that the caches cost. in_python: what Python has.
    """
    return round(UNSEEN * max(own - cold, 0) + DISPLACED * cold + UNSEEN_PYTHON * in_python)


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


class _Known(threading.local):
    wait: ProcessorWait | None = None
    pid = ns = 0


_known = _Known()


def processor_wait() -> ProcessorWait:
    """Return this thread's. Sessions share it: they live until the garbage collector finds them, and each
    would keep a file open."""
    if _known.wait is None or _known.pid != os.getpid():
        _known.wait, _known.pid = ProcessorWait(), os.getpid()
        _known.ns = _known.wait.ns()
    return _known.wait


def without_waits(ns: int) -> int:
    """Return how much of a time, which ends now, this thread ran.

    Leaves out all its waits since it last called this. If the time may begin later than that, call it with 0
    at the beginning.
    """
    wait = processor_wait()
    before, _known.ns = _known.ns, wait.ns()
    return max(ns + before - _known.ns, 0)


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
