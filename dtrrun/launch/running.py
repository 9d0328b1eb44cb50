"""Finds the user's running instances of dtrrun on this machine.

A run's processes have the name of its private folder of records in their environment, so it can be found from
any terminal, wherever that folder is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from dtrrun.launch.environment import RECORDS
from dtrrun.launch.outcome import explained, read_marks
from dtrrun.telemetry.run import Run, read_run


def find() -> list[Run]:
    """Return the runs, oldest first. Runs without a process that has imported torch are omitted."""
    found = []
    for folder in folders():
        run = read_run(folder)
        if run is not None and run.snapshots:
            found.append(replace(run, snapshots=explained(run.snapshots, read_marks(Path(folder)))))
    return sorted(found, key=lambda run: (run.start, run.pid))


def folders() -> set[str]:
    """Return the folders of records that the user's processes were started with."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and (folder := process.environ().get(RECORDS)):
                found.add(folder)
    return found
