"""Runs a log under a budget with a heuristic: the policy and the replay, chosen by name."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dtrrun.core.heuristics import make_heuristic
from dtrrun.core.search import make_policy
from dtrrun.simulator.counting import accesses, counting_policy

from .banish import BanishingReplay, IgnoringReplay
from .replay import Observer, Outcome, Replay
from .schedule import Schedule

REPLAYS: dict[str, type[Replay]] = {"eager": Replay, "banish": BanishingReplay, "ignore": IgnoringReplay}
"""By what happens to a storage when the program's last reference to it is released (App. C.5)."""


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
    count: bool = False,
    observer: Observer | None = None,
    previous: Schedule | None = None,
) -> Replay:
    """Make a replay of `schedule` with the paper's semantics (App. C) inside `budget_bytes`, None: no budget.

    heuristic: as for `make_policy`. deallocation: one of REPLAYS. limit: multiple of the plain run's time,
    above which it is thrashing (Sec. 4.2). paper_ties: among equal scores, choose as the authors' simulator
    does: the storage inserted last, where locked ones are reinserted; otherwise the first one. scan: find the
    least score by computing all, as the paper does. count: storage accesses (App. D.3), which takes longer.
    previous: the previous step, known to a heuristic with foresight; one like this if None. Raises ValueError
    for an unknown name.
    """
    if deallocation not in REPLAYS:
        raise ValueError(f"{deallocation!r} is not one of {', '.join(REPLAYS)}")
    if count:
        policy = counting_policy(make_heuristic(heuristic, seed), latest=paper_ties, scan=scan, seed=seed)
    else:
        policy = make_policy(heuristic, seed=seed, latest=paper_ties, scan=scan)
    return REPLAYS[deallocation](
        schedule,
        budget_bytes,
        policy,
        limit=limit,
        requeue=paper_ties,
        observer=observer,
        previous=(previous or schedule).step if policy.heuristic.foresight else None,
    )


def simulate(
    schedule: Schedule,
    budget_bytes: int | None,
    heuristic: str = "h_dtr_eq",
    *,
    count: bool = False,
    **options: Any,
) -> Outcome:
    """Run the replay that `prepare` makes, with the same arguments. Raises ValueError."""
    with without_collector():
        replay = prepare(schedule, budget_bytes, heuristic, count=count, **options)
        outcome = replay.run()
        if count:
            outcome.accesses = accesses(replay.policy)
        replay.take_apart()
    return outcome


@contextmanager
def without_collector() -> Iterator[None]:
    """Context without garbage collection: a replay makes no garbage, and collections would take half its
    time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
