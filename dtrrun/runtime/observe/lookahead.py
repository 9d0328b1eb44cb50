"""Chooses which steps of the program are recorded for heuristics with foresight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrrun.core.foresight import Foresight, WatchedStep
from dtrrun.core.observer import Observer
from dtrrun.runtime.dispatch.callbacks import Callbacks

TOGETHER = 2
"""Steps recorded in a row: two networks trained alternately have two kinds of steps."""
KNOWN = 4
"""The number of recorded steps that are kept."""


class Lookahead(Observer):
    """Records a step or two once memory runs short, and again when steps no longer match them."""

    def __init__(self, callbacks: Callbacks, steps: Sequence[WatchedStep] = ()) -> None:
        """steps: those already known; without any, the first ones are recorded."""
        self._ledger = callbacks.ledger
        self._history = callbacks.dtr.history
        self.foresight = self._ledger.policy.foresight = Foresight(self._ledger, steps)
        self._step: WatchedStep | None = None
        self._before: WatchedStep | None = None  # the step that has just ended, if it was recorded
        self._to_watch = 0 if steps else TOGETHER
        self._strange = 0  # steps in which the position was mostly unknown
        self._patience = 1  # how many are tolerated; doubled each time, for programs that never repeat

    def step_ended(self) -> None:
        foresight, step = self.foresight, self._step
        for one in (self._before, step):
            if one is not None:
                one.end(self._history.rescued_since)
        self._before = step
        if step is not None:
            self._to_watch -= 1
            if step not in foresight.steps:
                foresight.steps = [*foresight.steps, step][-KNOWN:]
        elif foresight.steps and foresight.lost * 2 > foresight.looks:
            self._strange += 1
            if self._strange >= self._patience:
                self._strange, self._patience, self._to_watch = 0, 2 * self._patience, TOGETHER
        foresight.begin()
        self._watch(self._to_watch > 0 and self._ledger.pressure)

    def end(self) -> None:
        """Stop recording: the rule no longer looks ahead."""
        self._watch(False)

    def _watch(self, wanted: bool) -> None:
        if wanted:
            self._step = WatchedStep(self._ledger.age)
            if self not in self._ledger.observers:
                self._ledger.observers.append(self)
        elif self._step is not None:
            self._step = None
            self._ledger.observers.remove(self)

    def finished(self, call: Any, outputs: Any) -> None:
        if not call.view and self._step is not None:
            self._step.watch(self._ledger, call.signature.operator.name, call.cost, call.versions)
