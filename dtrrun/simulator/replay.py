"""Replay of a schedule under a budget, with the paper's semantics (App. C.4 and C.5).

Implemented in `core/paper/semantics.h`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

from dtrrun.bindings import load
from dtrrun.core.foresight import Foresight, Made
from dtrrun.core.heuristics import make_heuristic

from .schedule import Schedule

DEALLOCATIONS = ("eager", "banish", "ignore")
"""What happens to a storage when the program's last reference to it is released (App. C.5)."""


class Stopped(Exception):
    """Raised when the replay cannot go on; `status` says why."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class ReplayOutcome:
    """status: ok, oom (nothing is left to evict) or thrash (over the time limit). Times in ns."""

    status: str
    time: int
    """Total time of the operators run until the end or the failure."""
    plain_time: int
    peak_bytes: int
    evictions: int
    rematerializations: int
    evaluations: int
    seconds: float
    """Duration of the replay."""
    accesses: int | None = field(default=None, kw_only=True)
    """Storage accesses of the policy (App. D.3), if they were counted."""
    chosen: int = field(default=0, kw_only=True)
    """Evictions that made room; the others are deallocations."""
    copies_out: int = field(default=0, kw_only=True)
    copies_in: int = field(default=0, kw_only=True)
    """Copies to the host, and back. The paper's semantics has none."""
    host_peak_bytes: int = field(default=0, kw_only=True)
    """The most that they took there together."""

    @property
    def overhead(self) -> float:
        return self.time / self.plain_time if self.plain_time else 1.0


Observer = Callable[[str, int], None]
"""Called with "compute" or "evict" and the number of the storage whose memory was allocated or freed, and
with "run" and the number of an operator that is about to run."""


class Replay:
    """One run of a schedule, or of operators that are added while it runs.

    budget_bytes: None for no budget.
    """

    def __init__(
        self,
        schedule: Schedule,
        budget_bytes: int | None,
        heuristic: str = "h_dtr_eq",
        *,
        deallocation: str = "eager",
        limit: float = 2.0,
        paper_ties: bool = True,
        scan: bool = False,
        seed: int = 0,
        observer: Observer | None = None,
        previous: Schedule | None = None,
    ) -> None:
        """heuristic, seed: as for `make_policy`.

        deallocation: one of DEALLOCATIONS. limit: multiple of the plain run's time; a run that recomputes
        more ends as `thrash` (Sec. 4.2). paper_ties: among equal scores, choose the storage inserted last,
        with locked ones reinserted, as the authors' simulator does; otherwise the one inserted first. scan:
        find the least score by computing all, as the paper does. previous: the previous step, known to a
        heuristic with foresight; if None, one like this. Raises ValueError for an unknown name, and
        CannotBuild.
        """
        if deallocation not in DEALLOCATIONS:
            raise ValueError(f"{deallocation!r} is not one of {', '.join(DEALLOCATIONS)}")
        self.schedule = schedule
        self._plain_time = schedule.cost
        rule = make_heuristic(heuristic, seed)
        self.core: Any = load().Replay(
            rule,
            budget_bytes,
            (limit - 1) * self._plain_time if limit < inf else inf,
            paper_ties,
            scan,
            deallocation,
            observer,
        )
        self.core.add(schedule.core)
        if rule.foresight:  # foresight must not keep the replay alive
            self.core.foresee(Foresight(weakref.proxy(self), [(previous or schedule).step]))

    @property
    def age(self) -> int:
        """Used by `core.foresight`, as is `made_last`."""
        age: int = self.core.age
        return age

    def made_last(self) -> Iterator[Made]:
        made: Iterator[Made] = self.core.made_last()
        return made

    def run(self) -> ReplayOutcome:
        started = perf_counter()
        core = self.core
        status = core.run(self.schedule.events, self.schedule.outputs)
        return ReplayOutcome(
            status,
            core.clock,
            self._plain_time,
            core.peak_bytes,
            core.evictions,
            core.rematerializations,
            core.score_evaluations,
            perf_counter() - started,
            chosen=core.chosen,
        )


def simulate(*given: Any, count: bool = False, **options: Any) -> ReplayOutcome:
    """Run a `Replay` of these arguments. count: whether to count storage accesses (App. D.3)."""
    replay = Replay(*given, **options)
    outcome = replay.run()
    if count:
        outcome.accesses = replay.core.accesses
    return outcome
