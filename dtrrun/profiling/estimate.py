"""Whether a program fits a GPU that is not here, and what a budget costs there: from its first steps.

`runtime.absent` has made the log. Sizes are those of CUDA's caching allocator, times those of `cards`, and
the simulator tells how dtrrun would run the same steps in less memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrrun.core.host import HostMemory, expected_host
from dtrrun.profiling.cards import WITHIN, Chosen, priced
from dtrrun.profiling.room import budget_for, room_in
from dtrrun.profiling.segments import made_by, released_by, taken_by
from dtrrun.simulator.live import Prediction, predict
from dtrrun.simulator.log import NOTE, Annotate, Call, Instruction, read_log

CONTEXT = 600_000_000
"""Bytes allowed for CUDA's context, libraries and their workspaces."""
CONTEXT_WITHIN = 300_000_000
"""By how much that may be wrong."""
LIMIT = 3.0
"""From which slowdown on a budget does not work, as in `dtrrun profile`."""
MOST_ON_HOST, HOST_LIMIT = 1 << 40, 50.0
"""What may leave for the host, in bytes, and the same limit if anything does: copies take longer."""
STEP, NEARER = 0.95, 3
"""The ratio of budgets that are tried one after another, and how often the last interval is halved."""
FITS, TIGHT, WITH_BUDGET, NO = "fits", "tight", "budget", "no"
"""Verdicts: it fits; it fits if the allocator returns what it does not use; inside a budget; not at all."""


class NothingOnGpu(Exception):
    """Raised when the program has not used its GPU."""


@dataclass
class At:
    """A budget, in bytes, and the steps' slowdown there; None if the program does not work there.

    host_bytes: what has to leave for the host.
    """

    budget_bytes: int
    slowdown: float | None
    host_bytes: int = 0


@dataclass
class Fit:
    """What a program takes on a card. Bytes, and ns for a step without a budget."""

    chosen: Chosen
    steps: int
    tensors_bytes: int
    allocated_bytes: int
    """Tensors and workspaces, when they take the most together."""
    segments_bytes: int
    step_ns: int
    card: At
    """A budget of all the card's memory."""
    least: At | None
    """The least budget that works; None if that is all that the program takes."""
    state_bytes: int
    """What is left when a step has ended: weights, optimizer state, and what variables keep."""
    notes: list[str] = field(default_factory=list)
    """Why what is counted may differ from what there will be."""

    @property
    def needs_bytes(self) -> int:
        return self.segments_bytes + CONTEXT

    @property
    def verdict(self) -> str:
        room = self.chosen.card.programs_bytes
        if self.needs_bytes <= room:
            return FITS
        if self.allocated_bytes + CONTEXT <= room:
            return TIGHT
        return NO if self.card.slowdown is None else WITH_BUDGET

    def values(self, words: Sequence[str]) -> dict[str, Any]:
        """Return JSON values. words: the target."""
        card = self.chosen.card
        return {
            "schema": "dtrrun.estimate/1",
            "target": list(words),
            "gpu": card.name,
            "priced_as": self.chosen.priced_as or card.name,
            "gpu_bytes": card.programs_bytes,
            "steps": self.steps,
            "verdict": self.verdict,
            "needs_bytes": self.needs_bytes,
            "tensors_bytes": self.tensors_bytes,
            "allocated_bytes": self.allocated_bytes,
            "segments_bytes": self.segments_bytes,
            "context_bytes": CONTEXT,
            "context_within_bytes": CONTEXT_WITHIN,
            "state_bytes": self.state_bytes,
            "step_seconds": self.step_ns / 1e9,
            "step_within": WITHIN,
            "slowdown": self.card.slowdown,
            "host_bytes": self.card.host_bytes,
            "least_budget_bytes": self.least and self.least.budget_bytes,
            "least_slowdown": self.least and self.least.slowdown,
            "notes": self.notes,
        }


def fit_of(
    path: Path, chosen: Chosen, steps: int, heuristics: Sequence[str], attend: Callable[[], None]
) -> Fit:
    """Return what the recorded steps take on a card.

    steps: how many the program has made; the log may go on after them. attend: called now and then. Raises
    NothingOnGpu, LogError, OSError.
    """
    log = priced(read_log(path), chosen.card)
    if not any(isinstance(one, Call) for one in log):
        raise NothingOnGpu
    plain = predict(log, None, heuristics[0], limit=math.inf)
    budgets = _Budgets(log, heuristics, attend)
    full = budget_for(plain.peak_bytes, CONTEXT)  # as long as workspaces find room besides
    # A budget that the peak fits into costs nothing.
    card = At(chosen.card.programs_bytes, 1.0)
    if card.budget_bytes < full:
        card = budgets.at(card.budget_bytes)
    if card.slowdown is None:
        card = budgets.at(card.budget_bytes, expected_host(MOST_ON_HOST, "cuda"), HOST_LIMIT)
    return Fit(
        chosen,
        steps,
        *taken_by(log),
        plain.steps[steps - 1].plain_time,
        card,
        budgets.least(full),
        _left(log),
        [one.text[len(NOTE) :] for one in log if isinstance(one, Annotate) and one.text.startswith(NOTE)],
    )


def _left(log: Sequence[Instruction]) -> int:
    """Return the bytes of what is there at the end of a log."""
    sizes: dict[int | None, int] = {}
    for one in log:
        sizes |= made_by(one)
        sizes.pop(released_by(one), None)
    return sum(sizes.values())


class _Budgets:
    """Predictions by budget, with the heuristic that does best."""

    def __init__(
        self, log: Sequence[Instruction], heuristics: Sequence[str], attend: Callable[[], None]
    ) -> None:
        self._log, self._heuristics, self._attend = log, heuristics, attend

    def at(self, budget: int, host: HostMemory | None = None, limit: float = LIMIT) -> At:
        found = [
            one for name in self._heuristics if (one := self._try(budget, name, host, limit)) is not None
        ]
        return min(found, key=lambda one: one.slowdown or limit, default=At(budget, None))

    def _try(self, budget: int, heuristic: str, host: HostMemory | None, limit: float) -> At | None:
        self._attend()
        room = room_in(budget, CONTEXT)
        found: Prediction = predict(self._log, room, heuristic, host=host, limit=limit)
        if found.status != "ok":
            return None
        steps = found.steps[1:] or found.steps
        plain = sum(one.plain_time for one in steps)
        slowdown = sum(one.time for one in steps) / plain if plain else 1.0
        return At(budget, slowdown, found.host_peak_bytes) if slowdown <= limit else None

    def least(self, full: int) -> At | None:
        """Return the least budget such that it and all larger ones that were tried work."""
        good, bad = None, 0
        budget = full
        while bad == 0:
            budget = int(budget * STEP)
            found = self.at(budget)
            if found.slowdown is None:
                bad = budget
            else:
                good = found
        top = full if good is None else good.budget_bytes
        for _ in range(NEARER):
            middle = self.at((top + bad) // 2)
            if middle.slowdown is None:
                bad = middle.budget_bytes
            else:
                good, top = middle, middle.budget_bytes
        return good
