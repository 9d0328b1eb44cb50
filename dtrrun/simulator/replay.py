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
    """One run of a schedule, or of operators that are added while it runs."""

    def __init__(
        self,
        schedule: Schedule,
        budget_bytes: int | None,
        heuristic: str,
        *,
        seed: int = 0,
        latest: bool = False,
        scan: bool = False,
        limit: float = 2.0,
        requeue: bool = False,
        deallocation: str = "eager",
        observer: Observer | None = None,
        previous: Schedule | None = None,
    ) -> None:
        """heuristic, seed, latest, scan: as for `make_policy`.

        limit: multiple of the plain run's time; a run that recomputes more ends as `thrash` (Sec. 4.2).
        requeue: reinsert storages into the pool after they were locked, as in the paper; this only affects
        ties. deallocation: eager, banish or ignore. previous: the previous step, known to a heuristic with
        foresight. Raises ValueError for an unknown name, and CannotBuild.
        """
        self.schedule = schedule
        self._plain_time = schedule.cost
        rule = make_heuristic(heuristic, seed)
        self.core: Any = load().Replay(
            rule,
            budget_bytes,
            (limit - 1) * self._plain_time if limit < inf else inf,
            latest,
            scan,
            requeue,
            deallocation,
            observer,
        )
        self.core.add(schedule.core)
        if rule.foresight:  # foresight must not keep the replay alive
            self.core.foresee(Foresight(weakref.proxy(self), [] if previous is None else [previous.step]))

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
