"""A thread of the launcher that queries the driver once a second, and whenever a step has ended.

It is a thread so that a slow driver delays neither the script's output nor its signals, and so that it works
the same with a live table, without one, and in a quiet run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dtrrun.monitor.ladder import Ladder, on_gpu
from dtrrun.monitor.nvml import NvmlUnavailable, start, stop
from dtrrun.monitor.sending import send
from dtrrun.monitor.violations import NAMED, Tally, budget_of, exceeded
from dtrrun.telemetry.driver import SOURCES, DriverUse, Figure, write
from dtrrun.telemetry.record import Snapshot, read_all

TICK_SECONDS = 0.1
"""Interval between checks of the step counters."""
EVERY_SECONDS = 1.0
"""Interval between queries to the driver, if no step ends."""
PATIENCE_SECONDS = 2.0
"""How long to wait for an unresponsive driver after the run."""


class Sampler:
    """A context around the run: entered before the target is started, left after it has ended.

    folder: where the processes keep their records. budget: bytes, or None. tell, alert: called in the
    thread with a line for the user; alert, if a process holds more than its budget. `started` begins the
    sampling.
    """

    def __init__(
        self,
        folder: str,
        budget: int | None,
        on_violation: str,
        tell: Callable[[str], None],
        alert: Callable[[str], None],
        nvml: Any = None,
    ) -> None:
        self._folder, self._budget, self._stops, self._tell = folder, budget, on_violation == "stop", tell
        self._alert = alert
        self._nvml: Any = None
        with suppress(NvmlUnavailable):
            self._nvml = start(nvml)
        self._ladder = Ladder(self._nvml)
        self._tallies: dict[int, Tally] = {}
        self._said: set[str] = set()
        self._send: Callable[[int], None] = lambda number: None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dtrrun-monitor", daemon=True)
        self.stopped: str | None = None
        """Why the run was stopped (`--on-violation stop`)."""

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_SECONDS)
        if self._nvml is not None and not self._thread.is_alive():  # not while the thread is using it
            stop(self._nvml)

    def started(self, send: Callable[[int], None]) -> None:
        """Begin sampling: the target runs. send: sends the target a signal."""
        self._send = send
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._tell(f"warning: cannot monitor the driver's memory figures: {error}")

    def shown(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        """Return `snapshots` with what the driver shows for them."""
        tallies = dict(self._tallies)
        return [
            replace(snapshot, driver=tally.use) if (tally := tallies.get(snapshot.pid)) else snapshot
            for snapshot in snapshots
        ]

    def _run(self) -> None:
        next_time, steps = 0.0, dict[int, int]()
        while not self._over.wait(TICK_SECONDS):
            try:
                seen = {s.pid: s.counters["steps"] for s in read_all(self._folder, tables=False) if on_gpu(s)}
                if not seen or (seen == steps and time.monotonic() < next_time):
                    continue
                next_time, steps = time.monotonic() + EVERY_SECONDS, seen
                self.sample()
            except Exception as error:  # a defect here must not affect the run
                self._once(
                    f"warning: no longer monitoring the driver's memory figures: {type(error).__name__}: "
                    f"{error}"
                )
                return

    def sample(self) -> None:
        """Query the driver about every process with a record."""
        snapshots = {snapshot.pid: snapshot for snapshot in read_all(self._folder)}
        for pid, (device, figure) in self._ladder.read(list(snapshots.values())).items():
            snapshot, tally = snapshots[pid], self._tallies.setdefault(pid, Tally())
            self._step_down(tally.use, figure)
            budget = budget_of(snapshot, self._budget)
            if tally.add(device, figure, budget) and budget is not None:
                self._exceeded(snapshot, figure, budget)
            with suppress(OSError):  # the folder is gone, or the disk is full: do without
                write(self._folder, pid, figure)

    def _step_down(self, before: DriverUse | None, figure: Figure) -> None:
        if before is not None and SOURCES.index(figure.source) > SOURCES.index(before.source):
            why = f" ({self._ladder.error})" if self._ladder.error else ""
            self._once(
                "warning: the driver's memory figure is no longer available from "
                f"{NAMED[before.source]}{why}; "
                f"using {NAMED[figure.source]} instead"
            )

    def _exceeded(self, snapshot: Snapshot, figure: Figure, budget: int) -> None:
        text = exceeded(snapshot, figure, budget)
        if not self._stops:
            use = self._tallies[snapshot.pid].use
            if use is not None and use.violations == 1:
                self._alert(f"warning: {text}")
        elif self.stopped is None:
            self.stopped = text
            send(snapshot, signal.SIGTERM)
            self._send(signal.SIGTERM)

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._tell(text)
