"""Optimizer steps: the only indication of a training step's end that every script gives."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtrrun.telemetry.fields import ENOUGH_STEPS, OVERHEADS
from dtrrun.telemetry.times import effective

KEPT = 32
GROUPS, GROUP, ALIKE = 4, 4, 16  # groups of so many steps whose peaks differ by at most one in so many bytes
SAMPLED = 256
MOST = 999.0
"""The largest slowdown reported: with several threads, overheads can add up to more than the time."""


_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code that every optimizer's `step` runs in."""


def is_inner() -> bool:
    """Return whether the optimizer that has just made a step was called by another one, whose step it is.

    An optimizer may consist of others (torchtitan's `OptimizersContainer`, ZeRO's). Call it from a hook.
    """
    steps, frame = 0, sys._getframe(1).f_back
    while frame is not None:
        steps += frame.f_code is _STEP
        if steps == 2:
            return True
        frame = frame.f_back
    return False


class StepClock:
    """Time and memory of each step. At its end `stepped` is called with the optimizer, and then `ended`.

    Then follow the program's own `callbacks`, and `afterwards()`, which may end it.

    `totals()` gives the running sums (ns and counts by name), whose differences are a step's figures; on a
    GPU, `effective` ones. What runs in the context `own()` is counted as dtrrun's work. Threads that train
    at once end their steps one after the other, each with the reentrant `lock`.
    """

    def __init__(
        self,
        totals: Any,
        ended: Any,
        stepped: Any = lambda optimizer: None,
        own: Any = nullcontext,
        afterwards: Any = lambda: None,
        lock: Any = None,
    ) -> None:
        self.count = 0
        self.last: dict[str, int] | None = None
        self.latest: deque[dict[str, int]] = deque(maxlen=KEPT)
        self.slowdowns = Sample()
        self._totals = totals
        self._stepped, self._ended, self._own, self._afterwards = stepped, ended, own, afterwards
        self._lock = nullcontext() if lock is None else lock
        self.callbacks: list[Callable[[], object]] = []
        self._before: dict[str, int] = totals()

    def install(self) -> None:
        def stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if is_inner():
                self._stepped(optimizer)
                return
            with self._own():
                self._step(optimizer)
            for callback in self.callbacks:
                callback()
            self._afterwards()

        self._handle = register_optimizer_step_post_hook(stepped)

    def remove(self) -> None:
        self._handle.remove()
        self.callbacks.clear()

    def _step(self, optimizer: Any) -> None:
        self._stepped(optimizer)
        with self._lock:
            self.count += 1
            now = self._totals()
            self.last = effective({name: now[name] - self._before[name] for name in now})
            self.last["index"] = self.count
            self.last["ended_ns"] = now["wall_ns"]
            self._before = now
            self.latest.append(self.last)
            if self.count > 1:  # the first one includes the start of the program, and of PyTorch
                self.slowdowns.add(min(slowdown(self.last), MOST))
            self._ended()

    def slowdown(self) -> float | None:
        """Return the median slowdown of the steps after the first; None if there are too few to say."""
        return self.slowdowns.median() if self.count >= ENOUGH_STEPS else None

    def take_as_much(self) -> bool:
        """Return whether groups of the last steps have had about the same peak.

        Several optimizers take turns, in steps that differ. A step whose end was interrupted has no peak.
        """
        if len(self.latest) < GROUPS * GROUP:
            return False
        peaks = [self.latest[-place].get("peak_bytes", 0) for place in range(1, GROUPS * GROUP + 1)]
        most = [max(peaks[place : place + GROUP]) for place in range(0, len(peaks), GROUP)]
        return max(most) - min(most) <= min(most) // ALIKE

    def under_way(self) -> dict[str, int]:
        """Return the figures of the current step so far."""
        now = self._totals()
        step = effective({name: now[name] - self._before[name] for name in now})
        return step | {"index": self.count + 1}


class Sample:
    """Evenly spaced values of a series of any length, `SAMPLED` at most."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._stride = 1
        self._seen = 0

    def add(self, value: float) -> None:
        if self._seen % self._stride == 0:
            if len(self._values) == SAMPLED:
                del self._values[1::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._values.append(value)
        self._seen += 1

    def median(self) -> float | None:
        """Return the median, or None if there are no values."""
        return median(self._values) if self._values else None


def overhead_ns(step: dict[str, int]) -> int:
    """Return a step's time for recomputation and dtrrun's own work: 0 in a plain run."""
    return sum(step.get(name, 0) for name in OVERHEADS)


def own_ns(step: dict[str, int]) -> int:
    """Return a step's time without that overhead, of which some is estimated: at least its operators'."""
    return max(step["wall_ns"] - overhead_ns(step), step.get("operators_ns", 0), 1)


def slowdown(step: dict[str, int]) -> float:
    """Return a step's time relative to the time without that overhead (1.0: none)."""
    return step["wall_ns"] / own_ns(step)
