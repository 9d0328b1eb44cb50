"""For heuristics with foresight: which steps of the program are watched."""

from __future__ import annotations

from dtrrun.ledger.record import Record
from dtrrun.policy.foresight import Foresight, Step
from dtrrun.runtime.careful import Careful

TOGETHER = 2
"""Steps watched in a row: two networks that are trained by turns have steps of two kinds."""
KNOWN = 4
"""Steps remembered, the latest."""
WHY = "a step is watched"


class Lookahead:
    """Watches a step or two once memory runs short, and again when steps no longer go like those.

    While a step is watched all its operators take the careful way; what they compute is the same.
    """

    def __init__(self, careful: Careful) -> None:
        self._careful, self._ledger = careful, careful.ledger
        self.foresight = careful.ledger.policy.foresight = Foresight(careful.ledger)
        self._step: Step | None = None
        self._to_watch = TOGETHER
        self._strange = 0  # steps in which it mostly did not know the position
        self._patience = 1  # how many of them are borne; doubled each time, for programs that never repeat

    def step_ended(self) -> None:
        foresight, step = self.foresight, self._step
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

    def _watch(self, wanted: bool) -> None:
        if wanted:
            self._step = Step(self._ledger.age)
            self._careful.take_all(WHY)
            self._careful.tell(self._saw)
        elif self._step is not None:
            self._step = None
            self._careful.tell_no_more(self._saw)
            self._careful.leave(WHY)

    def _saw(self, name: str, cost: int, inputs: list[Record]) -> None:
        assert self._step is not None
        self._step.watch(self._ledger, name, cost, inputs)
