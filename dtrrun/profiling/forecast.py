"""Converts the simulator's predictions (recomputed operators, copies, evictions) to a slowdown in time.

A step consists of its own time, recomputation, and dtrrun's bookkeeping. Its own time was measured in a plain
run. The simulator adds up costs, each the minimum of several calls: real operators take longer, by the same
factor as in the plain run. Copies to the host and back count as recomputation. Bookkeeping was measured
without a budget. Once memory runs short it is `PRESSED` times that, since storages enter the pool; each
eviction or rematerialization adds `EVENT_NS`, and each evaluation of a score `SCORE_NS` (least squares over
nine examples at five budgets each). Runs under a budget show the error for this program and machine: they
scale recomputation and bookkeeping by a factor each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrrun.profiling.trial import MeasuredStep, later
from dtrrun.simulator.live import PredictedStep, Prediction

PRESSED = 1.5
EVENT_NS, SCORE_NS = 60_000, 40_000
PRIOR = 0.5
"""Weight of the model: it counts like a measurement of this fraction of the step's own time.

On a busy machine the recomputation of one run varied randomly between 0.7 and 2.5 times the model's value.
"""


@dataclass
class Model:
    """The model of a program on a machine."""

    plain: Sequence[MeasuredStep]
    """Steps of a run without a budget."""
    scale: float
    """Ratio of an operator's time to its cost in the log."""
    predicted_again: float = PRIOR
    measured_again: float = PRIOR
    predicted_own: float = PRIOR
    measured_own: float = PRIOR
    """Sums over the runs so far, relative to the steps' own time: recomputation, bookkeeping (`own`)."""

    def shares(self, prediction: Prediction) -> list[tuple[float, float]]:
        """Return uncorrected recomputation (and copies) and bookkeeping per later step, by its own time."""
        found = []
        for step, plain in zip(prediction.steps, self.plain, strict=False):
            events = step.evictions + step.rematerializations
            pressed = PRESSED if prediction.evictions else 1.0
            own = pressed * plain.bookkeeping_ns + EVENT_NS * events + SCORE_NS * step.evaluations
            again = self.scale * (step.time - step.plain_time - step.copying) + step.copying
            found.append((again / plain.own_ns, own / plain.own_ns))
        return found[1:] or found

    def slowdowns(self, prediction: Prediction) -> list[float]:
        """Return the slowdown of each later step."""
        again = self.measured_again / self.predicted_again
        own = self.measured_own / self.predicted_own
        return [1 + again * a + own * b for a, b in self.shares(prediction)]

    def slowdown(self, prediction: Prediction) -> float | None:
        """Return the slowdown of all later steps together."""
        slowdowns = self.slowdowns(prediction)
        weights = [step.own_ns for step in later(self.plain)][: len(slowdowns)]
        if not weights:
            return None
        return sum(s * w for s, w in zip(slowdowns, weights, strict=True)) / sum(weights)

    def learn(self, prediction: Prediction, measured: Sequence[MeasuredStep]) -> None:
        """Correct the model by a run at the budget of this prediction."""
        steps, shares = later(measured), self.shares(prediction)
        own_ns = sum(step.own_ns for step in steps)
        if not own_ns or not shares or prediction.status != "ok":
            return
        weights = [step.own_ns for step in later(self.plain)][: len(shares)]
        bookkeeping = sum(step.bookkeeping_ns for step in steps)
        self.measured_own += bookkeeping / own_ns
        self.measured_again += (sum(step.overhead_ns for step in steps) - bookkeeping) / own_ns
        for (again, own), weight in zip(shares, weights, strict=True):
            self.predicted_again += again * weight / sum(weights)
            self.predicted_own += own * weight / sum(weights)


def scale_of(plain: Sequence[MeasuredStep], predicted: Sequence[PredictedStep]) -> float:
    """Return the ratio of the operators' time in a plain run to the sum of their costs in the log."""
    costs = {step.index: step.plain_time for step in predicted}
    steps = [step for step in later(plain) if costs.get(step.number)]
    cost = sum(costs[step.number] for step in steps)
    return sum(step.operators_ns for step in steps) / cost if cost else 1.0
