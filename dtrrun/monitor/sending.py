"""Sends signals to the processes of a run."""

from __future__ import annotations

import os
from contextlib import suppress

from dtrrun.monitor.ladder import same_namespace
from dtrrun.monitor.namespaces import is_ours
from dtrrun.telemetry.record import Snapshot


def send(snapshot: Snapshot, number: int) -> None:
    """Send a signal to a process that descends from us, or to its group if it has its own.

    torchrun's ranks have.
    """
    if not same_namespace(snapshot) or not is_ours(snapshot.pid):
        return
    with suppress(OSError):  # it has ended meanwhile
        if os.getpgid(snapshot.pid) == os.getpgrp():
            os.kill(snapshot.pid, number)
        else:
            os.killpg(os.getpgid(snapshot.pid), number)
