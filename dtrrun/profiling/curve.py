"""The simulator's predictions by budget and heuristic."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dtrrun.core.host import HostMemory
from dtrrun.profiling.forecast import Model
from dtrrun.profiling.room import room_in
from dtrrun.profiling.trial import OK, THRASH, TOO_SMALL, MeasuredStep, Trial
from dtrrun.settings import RuntimeSettings
from dtrrun.simulator.live import Prediction, predict
from dtrrun.simulator.log import Instruction

SHARES = range(95, 5, -5)
"""Percentages of the peak at which the curve is predicted."""
REFINEMENTS = 3
"""How often to halve the interval between the least working share and the next: to 0.6 % of the peak."""
STATUS = {"ok": OK, "oom": TOO_SMALL, "thrash": THRASH}


@dataclass(frozen=True)
class Forecast:
    """The prediction for a budget."""

    status: str
    slowdown: float | None
    evictions: int
    rematerializations: int
    steps: int
    """Number of completed steps."""
    host_bytes: int = 0
    """The most that copies on the host take together; 0 if nothing has to leave."""


@dataclass
class Point:
    """A budget, with the heuristic that does best at it."""

    budget_bytes: int
    heuristic: str
    predicted: Forecast
    trial: Trial | None = None

    @property
    def slowdown(self) -> float | None:
        """Return the slowdown, measured if possible, else predicted; None if the budget fails."""
        if self.trial is not None:
            return self.trial.slowdown if self.trial.status == OK else None
        return self.predicted.slowdown if self.predicted.status == OK else None

    @property
    def host_bytes(self) -> int:
        """Return what copies on the host take, measured if possible, else predicted."""
        return self.predicted.host_bytes if self.trial is None else self.trial.host_bytes

    @property
    def told_slowdown(self) -> float | None:
        """Return `slowdown` as it is told to users: None if the run made too few steps to say."""
        return self.slowdown if self.trial is None else self.trial.told_slowdown


@dataclass
class Curve:
    """Predictions for one log.

    attend: called before each. overhead: in bytes on a GPU, None on the CPU. host: where tensors may leave
    for; None: they stay.
    """

    log: Sequence[Instruction]
    model: Model
    settings: RuntimeSettings
    heuristics: Sequence[str]
    limit: float
    attend: Callable[[], None]
    overhead: int | None = None
    host: HostMemory | None = None
    swept: list[int] = field(default_factory=list)
    """Budgets over the whole curve, largest first."""
    _predictions: dict[tuple[int, str], Prediction] = field(default_factory=dict)

    def sweep(self, peak: int, seconds: float) -> int:
        """Predict budgets over the whole curve in about `seconds`.

        Returns the least budget such that it and all larger ones work.
        """
        until = time.monotonic() + seconds
        for heuristic in self.heuristics:
            failures = 0
            for share in SHARES:
                if time.monotonic() > until or failures > 1:  # one may be an outlier; two, hardly
                    break
                status = self.forecast(peak * share // 100, heuristic).status
                failures = 0 if status == OK else failures + 1
        self.swept = sorted({budget for budget, _ in self._predictions}, reverse=True)
        good, bad = peak, 0
        for budget in self.swept:
            if self.best(budget).predicted.status != OK:
                bad = budget
                break
            good = budget
        for _ in range(REFINEMENTS if bad else 0):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.best(middle).predicted.status == OK else (good, middle)
        return good

    def forecast(self, budget: int, heuristic: str) -> Forecast:
        """Predict one budget and heuristic."""
        key = budget, heuristic
        if key not in self._predictions:
            self.attend()
            self._predictions[key] = predict(
                self.log,
                room_in(budget, self.overhead),
                heuristic,
                host=self.host,
                limit=self.limit,
                seed=self.settings.seed,
                sample=self.settings.sample,
                ignore_small=self.settings.ignore_small,
            )
        found = self._predictions[key]
        status = STATUS[found.status]
        slowdown = self.model.slowdown(found) if status == OK else None
        if status == OK and max(self.model.slowdowns(found), default=1.0) > self.limit:
            status, slowdown = THRASH, None
        return Forecast(
            status,
            slowdown,
            found.evictions,
            found.rematerializations,
            len(found.steps),
            found.host_peak_bytes,
        )

    def best(self, budget: int) -> Point:
        """Return the heuristic with the least predicted slowdown; if none works, the one with most steps.

        Ties go to the first.
        """
        known = [name for name in self.heuristics if (budget, name) in self._predictions]
        forecasts = [(name, self.forecast(budget, name)) for name in known or self.heuristics]
        name, forecast = min(forecasts, key=lambda one: (one[1].slowdown or math.inf, -one[1].steps))
        return Point(budget, name, forecast)

    def learn(self, point: Point, steps: Sequence[MeasuredStep]) -> None:
        """Use a run's measurements to correct the predictions of other points."""
        self.model.learn(self._predictions[point.budget_bytes, point.heuristic], steps)
