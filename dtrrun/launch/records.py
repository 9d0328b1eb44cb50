"""The private folder for the records of a run's processes, and cleaning up after killed launchers.

It is in the folder for temporary files (TMPDIR), not in XDG_RUNTIME_DIR: that is removed when the user logs
out, while a run started with nohup continues.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dtrrun.launch.running import folders
from dtrrun.telemetry.lock import abandoned_on, drop, machine, take

PREFIX = "dtrrun-"
STALE_SECONDS = 86_400.0
"""Age of the last write after which a run of another machine, or from before a reboot, is stale."""


@contextmanager
def records_folder() -> Iterator[str]:
    """Context with a new folder (mode 0700, unpredictable name), removed at the end. Raises OSError."""
    clean_up()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        descriptor = take(folder)
        try:
            yield folder
        finally:
            drop(folder, descriptor)


def clean_up() -> None:
    """Remove the user's folders of killed launchers that no process uses any more."""
    stale = [path for path in _candidates() if _is_stale(path)]
    if stale:
        used = {os.path.realpath(folder) for folder in folders()}
        for path in stale:
            if os.path.realpath(path) not in used:
                shutil.rmtree(path, ignore_errors=True)


def _candidates() -> list[str]:
    found = []
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with suppress(OSError):
                    if _is_ours(entry.stat(follow_symlinks=False)):
                        found.append(entry.path)
    return found


def _is_ours(about: os.stat_result) -> bool:
    """Return whether it is a folder (not a link) of this user that others cannot access."""
    private = stat.S_ISDIR(about.st_mode) and not stat.S_IMODE(about.st_mode) & 0o077
    return private and about.st_uid == os.getuid()


def _touched(path: str) -> float:
    """Return when anything in a folder was last written, in seconds since the epoch."""
    with os.scandir(path) as entries:
        times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    return max(times, default=os.stat(path).st_mtime)


def _is_stale(path: str) -> bool:
    where = abandoned_on(path)
    if where is None:
        return False
    # A lock taken on another machine may only appear free.
    with suppress(OSError):
        return where == machine() or _touched(path) < time.time() - STALE_SECONDS
    return False
