"""Process ids across PID namespaces: the driver may use another id than the process itself.

A launcher outside a container sees a process inside by an outer id; /proc/PID/status has all ids from there
inwards (NSpid, Linux 4.1). From inside, the outer ids are not visible.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

PROC = Path("/proc")


def outer_id(inner: int, listed: Iterable[int], ancestor: int | None = None, proc: Path = PROC) -> int | None:
    """Return which id in `listed` is the process whose own id is `inner`, in a namespace below ours.

    It must descend from `ancestor` (by default this process), since other containers have a process `inner`,
    too.
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


def _ids(pid: int, proc: Path) -> list[int]:
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return []
    line = next((line for line in status.splitlines() if line.startswith("NSpid:")), "")
    return [int(word) for word in line.split()[1:]]


def _ancestors(pid: int) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(pid).parents()]
    except psutil.Error:
        return []


def is_running(pid: int) -> bool:
    """Return whether there is such a process that is not a zombie, whose memory is already freed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
