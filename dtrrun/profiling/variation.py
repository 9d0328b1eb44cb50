"""Finds the largest value of a program's option that fits into a budget, by short real runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dtrrun.profiling.search import largest, largest_below
from dtrrun.profiling.study import ScriptFailed
from dtrrun.profiling.trial import FAILED, OK, Trial, run_trial
from dtrrun.profiling.vary import with_value
from dtrrun.settings import RuntimeSettings

MARGIN_PERCENT = 5
"""A value is certain if it also works in a budget that is smaller by this much: a step may need more."""


@dataclass
class Variation:
    """The attempts so far. `command` and `settings`, including the budget, apply to all runs."""

    command: Sequence[str]
    settings: RuntimeSettings
    template: Sequence[str]
    low: int
    high: int
    limit: float
    attend: Callable[[Variation], None] = lambda _: None

    now: str = ""
    left: float | None = None
    tried: dict[int, Trial] = field(default_factory=dict)
    best: int | None = None
    with_margin: dict[int, Trial] = field(default_factory=dict)
    """Those in a budget that is smaller by the margin."""
    certain: int | None = None
    """The largest value that works there; None if none does, or none was tried yet."""
    complete: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def run(self) -> None:
        """Run the search.

        Raises LaunchError; ScriptFailed if the program itself fails with the least value.
        """
        self.best = largest(self._fits, self.low, self.high)
        if self.best is not None:
            self.certain = largest_below(self._fits_with_margin, self.low, self.best)
        self.complete = True

    @property
    def margin_budget(self) -> int:
        """Return the budget less the margin, in bytes."""
        assert self.settings.budget_bytes is not None
        return self.settings.budget_bytes * (100 - MARGIN_PERCENT) // 100

    def _fits(self, value: int) -> bool:
        trial = self.tried[value] = self._try(value, self.settings)
        if value == self.low and trial.status == FAILED:
            raise ScriptFailed(trial)
        if trial.status == OK:
            self.best = max(value, self.best or 0)
        return trial.status == OK

    def _fits_with_margin(self, value: int) -> bool:
        trial = self._try(value, replace(self.settings, budget_bytes=self.margin_budget))
        self.with_margin[value] = trial
        if trial.status == OK:
            self.certain = max(value, self.certain or 0)
        return trial.status == OK

    def _try(self, value: int, settings: RuntimeSettings) -> Trial:
        self.now = " ".join(self.template).replace("{}", str(value))
        self.left = self._left()
        settings = replace(settings, max_slowdown=self.limit, on_thrash="stop")
        command = with_value(self.command, self.template, value)
        trial = run_trial(settings, command, self._patience(value), lambda: self.attend(self))
        if trial.status == OK and not trial.steps:
            trial = replace(trial, status=FAILED)
        return trial

    def _patience(self, value: int) -> float:
        """Return a time limit that allows for thrashing, assuming time proportional to the value."""
        if self.low not in self.tried:
            return math.inf
        return (self.limit + 2) * self.tried[self.low].seconds * value / self.low + 60

    def _left(self) -> float | None:
        if self.best is None:
            return None
        failed = [value for value, trial in self.tried.items() if trial.status != OK]
        open_values = (min(failed) if failed else self.high) - self.best
        return max(trial.seconds for trial in self.tried.values()) * math.log2(max(open_values, 1) + 1)
