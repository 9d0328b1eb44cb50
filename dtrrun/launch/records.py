"""The private folder in which a run's processes keep their records, and what killed launchers left of theirs.

A launcher holds a lock in its folder for as long as it lives. The system lets go of it whatever ends the
launcher, and containers that share the folder see it too, where process ids would say nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dtrrun.launch.running import folders

PREFIX = "dtrrun-"
LOCK = "lock"
STALE_SECONDS = 86_400.0


@contextmanager
def records_folder() -> Iterator[str]:
    """A new folder (mode 0700, of a name that nobody can foresee), which goes at the end. Raises OSError."""
    clean_up()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        finally:
            os.close(descriptor)


def clean_up() -> None:
    """Remove the user's folders that nothing has touched for a day and that no process has to do with."""
    stale = [path for path in _candidates() if not _is_held(path)]
    if stale:
        used = {os.path.realpath(folder) for folder in folders()}
        for path in stale:
            if os.path.realpath(path) not in used:
                shutil.rmtree(path, ignore_errors=True)


def _candidates() -> list[str]:
    oldest = time.time() - STALE_SECONDS
    found = []
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with suppress(OSError):
                    if _is_ours(entry.stat(follow_symlinks=False)) and _touched(entry.path) < oldest:
                        found.append(entry.path)
    return found


def _is_ours(about: os.stat_result) -> bool:
    """No link, and nothing of another user's, nor open to one."""
    private = stat.S_ISDIR(about.st_mode) and not stat.S_IMODE(about.st_mode) & 0o077
    return private and about.st_uid == os.getuid()


def _touched(path: str) -> float:
    """When anything in a folder was last written, in seconds since the epoch."""
    with os.scandir(path) as entries:
        times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    return max(times, default=os.stat(path).st_mtime)


def _is_held(path: str) -> bool:
    """A launcher of this or of another container holds it. A folder without a lock is none of ours."""
    try:
        descriptor = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
