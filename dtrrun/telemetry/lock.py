"""The lock that a launcher holds on a run's folder of records while it lives.

Standard library only. The system releases the lock however the launcher ends, and containers that share the
folder see it too, whereas process ids would be useless there. The lock file identifies the machine that took
it, and that machine's boot: some network file systems keep locks local to a machine.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

LOCK = "lock"


def take(folder: str) -> int:
    """Lock our own new folder. Returns a descriptor for `drop`. Raises OSError."""
    path = os.path.join(folder, LOCK)
    descriptor = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # if the file system has no locks, it never counts as abandoned
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, machine().encode())
    os.rename(f"{path}.new", path)  # so it never appears unlocked
    return descriptor


def drop(folder: str, descriptor: int) -> None:
    """End normally: remove the lock file, since a free lock means abandoned."""
    with suppress(OSError):
        os.unlink(os.path.join(folder, LOCK))
    os.close(descriptor)


def abandoned_on(folder: str) -> str | None:
    """Return the `machine` on which the folder's launcher was killed, or None if it was not killed."""
    path = os.path.join(folder, LOCK)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # not one of ours, or ended normally
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
    """Return an id of this machine's boot, equal in all of its containers; empty if unavailable."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
