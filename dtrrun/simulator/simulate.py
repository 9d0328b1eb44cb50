"""Runs a log under a budget with a heuristic, as the paper's simulator does."""

from __future__ import annotations

from typing import Any

from .replay import Observer, Replay, ReplayOutcome
from .schedule import Schedule

DEALLOCATIONS = ("eager", "banish", "ignore")
"""What happens to a storage when the program's last reference to it is released (App. C.5)."""


def prepare(
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
) -> Replay:
    """Make a replay of `schedule` with the paper's semantics (App. C) in `budget_bytes` (None: no budget).

    heuristic: as for `make_policy`. deallocation: one of DEALLOCATIONS. limit: multiple of the plain run's
    time, above which it is thrashing (Sec. 4.2). paper_ties: among equal scores, choose the storage inserted
    last, with locked ones reinserted, as the authors' simulator does; otherwise the one inserted first.
    scan: find the least score by computing all, as the paper does. previous: the previous step, known to a
    heuristic with foresight; if None, one like this. Raises ValueError for an unknown name, and CannotBuild.
    """
    if deallocation not in DEALLOCATIONS:
        raise ValueError(f"{deallocation!r} is not one of {', '.join(DEALLOCATIONS)}")
    return Replay(
        schedule,
        budget_bytes,
        heuristic,
        seed=seed,
        latest=paper_ties,
        scan=scan,
        limit=limit,
        requeue=paper_ties,
        deallocation=deallocation,
        observer=observer,
        previous=previous or schedule,
    )


def simulate(
    schedule: Schedule,
    budget_bytes: int | None,
    heuristic: str = "h_dtr_eq",
    *,
    count: bool = False,
    **options: Any,
) -> ReplayOutcome:
    """Run the replay that `prepare` makes, with the same arguments.

    count: whether to count storage accesses (App. D.3).
    """
    replay = prepare(schedule, budget_bytes, heuristic, **options)
    outcome = replay.run()
    if count:
        outcome.accesses = replay.core.accesses
    return outcome
