"""Ends a training process whose launcher was killed, since its budget and record are no longer supervised.

The system signals the process that the launcher started directly (`launch.attached`). Its descendants, for
instance through a shell, check for themselves.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from time import monotonic

from dtrrun.telemetry.lock import abandoned_on

EVERY_SECONDS = 1.0


class Launcher:
    """Checks occasionally whether the launcher still holds the folder `record_dir`, if there is one."""

    def __init__(self, record_dir: str | None) -> None:
        self._record_dir = record_dir
        self._next = monotonic() + EVERY_SECONDS

    def look(self) -> None:
        """Send this process SIGTERM, once, if the launcher was killed."""
        if self._record_dir is None or monotonic() < self._next:
            return
        self._next = monotonic() + EVERY_SECONDS
        if abandoned_on(self._record_dir) is None:
            return
        self._record_dir = None
        with suppress(OSError, ValueError):  # its terminal may have closed with the launcher
            print(
                f"dtrrun: error: dtrrun itself was killed, so process {os.getpid()} ends (SIGTERM)",
                file=sys.stderr,
                flush=True,
            )
        os.kill(os.getpid(), signal.SIGTERM)
