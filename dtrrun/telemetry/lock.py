"""The lock by which a launcher holds a run's folder of records for as long as it lives.

Standard library only. The system lets go of the lock whatever ends the launcher, and containers that share
the folder see it too, where process ids would say nothing. Its file says on which machine it was taken, and
since which start of that: some network file systems keep locks to the machine that took them.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

LOCK = "lock"


def take(folder: str) -> int:
    """Hold our own new folder; a descriptor for `drop`. Raises OSError."""
    path = os.path.join(folder, LOCK)
    descriptor = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: then nobody can take it for abandoned
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, machine().encode())
    os.rename(f"{path}.new", path)  # nobody ever sees it free
    return descriptor


def drop(folder: str, descriptor: int) -> None:
    """We end as we should: whoever looks from now on finds no lock, rather than a free one."""
    with suppress(OSError):
        os.unlink(os.path.join(folder, LOCK))
    os.close(descriptor)


def abandoned_on(folder: str) -> str | None:
    """Where a launcher was killed and left its folder behind, its `machine`; None where it was not."""
    path = os.path.join(folder, LOCK)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # none of ours, or it ended as it should
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return None
        return os.read(descriptor, 100).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def machine() -> str:
    """This machine since it was started: the same in all of its containers. Empty where it does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
