"""Process ids across PID namespaces: the driver may know a process by an id other than its own.

A launcher outside a container sees a process inside by an outer id; /proc/PID/status has all ids from there
inwards (NSpid, Linux 4.1). From inside, the outer ids are not visible.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dtrrun.telemetry.record import exists

PROC = Path("/proc")


def outer_id(inner: int, listed: Iterable[int], ancestor: int | None = None, proc: Path = PROC) -> int | None:
    """Return the id in `listed` of the process whose own id is `inner`, in a namespace below ours.

    It must descend from `ancestor` (by default this process), since other containers may have a process
    `inner` too.
    """
    above = os.getpid() if ancestor is None else ancestor
    for pid in listed:
        ids = _ids(pid, proc)
        if len(ids) > 1 and ids[-1] == inner and above in _ancestors(pid):
            return pid
    return None


def is_ours(pid: int) -> bool:
    """Return whether process `pid` descends from this one."""
    return os.getpid() in _ancestors(pid)


def listed_here(pids: Iterable[int]) -> bool:
    """Return whether these ids, listed by the driver, can be those of our namespace: all are in use here.

    A driver that lists the host's processes by the host's ids lists at least one id that is not in use here.
    """
    return all(map(exists, pids))


def is_running(pid: int) -> bool:
    """Return whether process `pid` exists and is not a zombie, whose memory is already freed."""
    return exists(pid) and not _field(pid, "State:", PROC).startswith("Z")


def _ids(pid: int, proc: Path) -> list[int]:
    return [int(word) for word in _field(pid, "NSpid:", proc).split()]


def _ancestors(pid: int) -> Iterator[int]:
    while parent := int(_field(pid, "PPid:", PROC) or 0):
        yield parent
        pid = parent


def _field(pid: int, name: str, proc: Path) -> str:
    """Return a line of a process's status without its name; an empty text if there is none."""
    try:
        status = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return ""
    line = next((line for line in status.splitlines() if line.startswith(name)), "")
    return line.removeprefix(name).strip()
