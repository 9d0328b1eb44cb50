"""A process that runs without a budget: only its steps are counted and timed (`dtrrun smoke`)."""

from __future__ import annotations

import os
from contextlib import suppress
from time import perf_counter_ns as now_ns
from typing import Any

from dtrrun.runtime import optional
from dtrrun.runtime.launcher import Launcher
from dtrrun.runtime.observe.steps import StepClock
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.fields import COUNTERS

STEPS = COUNTERS.index("steps")
BUDGET = COUNTERS.index("budget_bytes")
DEVICE = COUNTERS.index("device_index")


class Plain:
    """Stands in for a `Session`, as far as a process started by the launcher needs one."""

    running = False

    def __init__(self, settings: RuntimeSettings) -> None:
        self._max_steps = settings.max_steps
        self._started_ns = now_ns()
        self.steps = StepClock(self._times, self._step_ended)
        self._parts: list[Any] = [*optional.training_state(settings), self.steps]
        self._launcher = Launcher(settings.record_dir)
        self.writer: Any = None

    def start(self, writer: Any = None) -> None:
        self.writer = writer
        if writer is not None:
            writer.counters[BUDGET] = writer.counters[DEVICE] = -1
        for part in self._parts:
            part.install()
        self._publish()
        os.register_at_fork(after_in_child=self._forked)

    def stop(self) -> None:
        for part in reversed(self._parts):
            part.remove()
        self._parts.clear()

    def ended(self) -> None:
        """Called when the program ends by itself."""

    def _forked(self) -> None:
        if self.writer is not None:
            self.writer.forked()
            self.writer = None

    def _times(self) -> dict[str, int]:
        """Attribute all time to the program."""
        wall = now_ns() - self._started_ns
        return {"wall_ns": wall, "operators_ns": wall}

    def _step_ended(self) -> None:
        self._launcher.look()
        self._publish()
        if self._max_steps is not None and self.steps.count >= self._max_steps:
            raise SystemExit(0)

    def _publish(self) -> None:
        if self.writer is not None:
            with suppress(OSError, ValueError):
                self.writer.counters[STEPS] = self.steps.count
                self.writer.publish({"step": self.steps.last, "latest_steps": list(self.steps.latest)})
