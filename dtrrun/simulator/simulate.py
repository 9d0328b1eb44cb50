"""A log under a budget by a heuristic: the policy and the replay, chosen by name."""

from __future__ import annotations

from dtrrun.policy import make_heuristic, make_policy
from dtrrun.policy.counting import accesses, counting_policy

from .banish import BanishingReplay
from .replay import IgnoringReplay, Observer, Outcome, Replay
from .schedule import Schedule

REPLAYS: dict[str, type[Replay]] = {"eager": Replay, "banish": BanishingReplay, "ignore": IgnoringReplay}
"""By what happens to a storage when the program's last reference to it is gone (App. C.5)."""


def simulate(
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
) -> Outcome:
    """Replay `schedule` with the paper's semantics (App. C) inside `budget_bytes`, None: without a budget.

    heuristic: as for `make_policy`. deallocation: one of REPLAYS. limit: times the plain run's time, beyond
    which it is thrashing (Sec. 4.2). paper_ties: of equal scores, choose as the authors' simulator does: the
    storage that came into the pool last, where one that was locked comes in anew; else that which came first.
    scan: find the least score by computing all, as the paper does. count: storage accesses (App. D.3), which
    takes longer. Raises ValueError for an unknown name.
    """
    if deallocation not in REPLAYS:
        raise ValueError(f"{deallocation!r} is none of {', '.join(REPLAYS)}")
    if count:
        policy = counting_policy(make_heuristic(heuristic, seed), latest=paper_ties, scan=scan, seed=seed)
    else:
        policy = make_policy(heuristic, seed=seed, latest=paper_ties, scan=scan)
    replay = REPLAYS[deallocation](
        schedule, budget_bytes, policy, limit=limit, requeue=paper_ties, observer=observer
    )
    outcome = replay.run()
    if count:
        outcome.accesses = accesses(policy)
    return outcome
