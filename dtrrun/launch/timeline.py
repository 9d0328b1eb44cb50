"""The course of a run: a thread of the launcher reads its records periodically."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dtrrun.launch.periodic import Periodic
from dtrrun.launch.series import Series
from dtrrun.telemetry.record import Snapshot, read_all

EVERY_SECONDS = 0.1
STEPS_EVERY_SECONDS = 1.0
STEPS_BEHIND = 8
"""Steps that may be missing before tables are read: a process keeps its last 32."""
MOST_PROCESSES = 64


class Timeline:
    """Reads the records in `folder` while entered; `values` returns what it saw."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._started = time.time()
        self._started_ns = time.monotonic_ns()
        self._series: dict[tuple[int, Any], Series] = {}
        self._steps_read_ns = 0
        self._periodic = Periodic("timeline", EVERY_SECONDS, self._watch)

    def __enter__(self) -> Timeline:
        self._periodic.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._periodic.stop()
        self.look(tables=True)

    @property
    def started_ns(self) -> int:
        """The origin of its seconds, on the monotonic clock."""
        return self._started_ns

    def values(self, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
        """Return JSON values (docs/report.md) for the processes in `snapshots`: others may be helpers."""
        wanted = [(snapshot.pid, snapshot.meta.get("start")) for snapshot in snapshots]
        return {"processes": [self._series[key].values() for key in wanted if key in self._series]}

    def look(self, tables: bool = False) -> None:
        """Take one sample of each process. tables: including its steps."""
        for snapshot in read_all(self._folder, tables):
            series = self._of(snapshot)
            if series is None:
                continue
            if not series.over:
                series.add(snapshot, (snapshot.read_ns - self._started_ns) / 1e9)
                series.over = snapshot.ended or not snapshot.alive
            with suppress(TypeError):  # a process may publish anything
                series.add_steps(snapshot.tables.get("latest_steps"))

    def _watch(self) -> None:
        with suppress(OSError):
            self.look(self._steps_are_due())

    def _steps_are_due(self) -> bool:
        """Return True once a second, or if some process may soon drop steps that we do not have."""
        now = time.monotonic_ns()
        due = now - self._steps_read_ns > STEPS_EVERY_SECONDS * 1e9
        due = due or any(series.behind >= STEPS_BEHIND for series in self._series.values())
        if due:
            self._steps_read_ns = now
        return due

    def _of(self, snapshot: Snapshot) -> Series | None:
        start = snapshot.meta.get("start")
        key = snapshot.pid, start
        if key not in self._series:
            if len(self._series) >= MOST_PROCESSES:
                return None
            origin = start - self._started if isinstance(start, (int, float)) else 0.0
            self._series[key] = Series(snapshot, origin)
        return self._series[key]
