"""Finds the heuristic and settings with the least overhead for a log and a budget.

A recorded step can be replayed any number of times. The search first tries some heuristics that each win
somewhere, then varies the settings of the best h_chain (`dtrrun.core.chain`) one at a time, as long as that
improves the result. A replay ends as soon as it has recomputed more than the best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

from dtrrun.core.chain import NAMED, Settings, parse

from .replay import ReplayOutcome

STARTS = (
    "h_next",
    "h_chain",
    "msps",
    "h_dtr_eq",
    Settings("ancestors", 0.2, 0.2, False).name,
    Settings("e_star", 0.0, 1.0, False).name,
    Settings("e_star", 0.2, 1.0, False).name,
    Settings("e_star", 0.5, 1 / 3).name,
    Settings("e_star", 0.5, 1.5, False).name,
    "lru",
    "size",
    "h_dtr",
)
EXPONENTS = (0.0, 0.1, 0.2, 1 / 3, 0.5, 0.75, 1.0)
NEXT_EXPONENTS = (*EXPONENTS, 1.5, 2.0)
MOST_TRIES = 48


@dataclass(frozen=True)
class Found:
    """The best outcome, its settings, and everything that was tried.

    If no attempt succeeds, `outcome` is a failed one. Its `seconds` cover all replays.
    """

    heuristic: str
    outcome: ReplayOutcome
    tried: tuple[str, ...]


class Replayer(Protocol):
    """`simulate` or `predict`, bound to a log and a budget."""

    def __call__(self, heuristic: str, *, limit: float) -> ReplayOutcome: ...


def find(
    replay: Replayer,
    *,
    limit: float = 2.0,
    starts: Sequence[str] = STARTS,
    tell: Callable[[str, ReplayOutcome], None] | None = None,
) -> Found:
    """Find the best heuristic.

    limit: multiple of the plain time, above which a replay fails. starts: tried first. tell: called for each
    heuristic that is better than all before it.
    """
    started = perf_counter()
    tried: dict[str, ReplayOutcome] = {}
    best = ""

    def attempt(name: str) -> bool:
        """Try a heuristic. Return whether it is better than all before it."""
        nonlocal best
        if name in tried or len(tried) >= MOST_TRIES:
            return False
        survives = bool(best) and tried[best].status == "ok"
        bound = min(limit, tried[best].overhead) if survives else limit
        outcome = tried[name] = replay(name, limit=bound)
        better = outcome.status == "ok" and (not survives or outcome.overhead < tried[best].overhead)
        if better or not best:
            best = name
        if better and tell is not None:
            tell(name, outcome)
        return better

    for name in starts:
        attempt(name)
    centre = _centre(best)
    moved = True
    while moved:
        moved = False
        for one in _neighbours(centre):
            if attempt(one.name):
                centre, moved = one, True
                break
    outcome = replace(tried[best], seconds=perf_counter() - started)
    return Found(best, outcome, tuple(tried))


def _centre(name: str) -> Settings:
    """Return the h_chain settings that equal, or are nearest to, the heuristic of that name."""
    known = {
        "msps": Settings("ancestors", 0.0, 0.0, False),
        "h_dtr": Settings("e_star", 1.0, 0.0, False),
        "h_dtr_eq": Settings("e_star", 1.0, 0.0, False),
    }
    return parse(name) or known.get(name) or NAMED["h_next"]


def _neighbours(centre: Settings) -> Iterator[Settings]:
    for exponent in _beside(centre.staleness, EXPONENTS):
        yield centre._replace(staleness=exponent)
    for exponent in _beside(centre.next, NEXT_EXPONENTS):
        yield centre._replace(next=exponent)
    yield centre._replace(released_first=not centre.released_first)
    yield centre._replace(cost="e_star" if centre.cost == "ancestors" else "ancestors")


def _beside(exponent: float, exponents: Sequence[float]) -> list[float]:
    """Return the two exponents to either side, nearest first."""
    place = min(range(len(exponents)), key=lambda i: abs(exponents[i] - exponent))
    others = (place - 1, place + 1, place - 2, place + 2)
    return [exponents[other] for other in others if 0 <= other < len(exponents)]
