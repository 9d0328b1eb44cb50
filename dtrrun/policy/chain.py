"""h_chain: rules of ours, without and with knowledge of the step before.

    c(t) / [m(t) · s(t)^S · d(t)^D]

c(t), by default over the evicted ancestors e_R, is what evicting t adds to the work to come: t, and what it
takes to have t again. Its evicted descendants, which h_dtr counts, will have to be run whether t is evicted
or not (c=e_star counts them all the same). Staleness s tells little of the next use where what was made first
is used last, so only a root of it counts (S is 1/3): it decides near ties at every scale of cost. Storages
that the program has released are evicted first (RELEASED): they are wanted only for evicted storages that
depend on them, and what is wanted of them now is locked.

d(t) is the time until t is next used, by the program or for an evicted descendant, as the step before had it
(`foresight`); where that does not tell, it counts as 1 for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

RELEASED = 1e-6


class Settings(NamedTuple):
    """`staleness`, `next`: the exponents S and D, from 0 to 1."""

    cost: str = "ancestors"
    staleness: float = 1 / 3
    next: float = 0.0
    released_first: bool = True

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        for name, settings in NAMED.items():
            if settings == self:
                return name
        released = "first" if self.released_first else "alike"
        return f"h_chain(c={self.cost},s={self.staleness:.3g},next={self.next:.3g},released={released})"


NAMED = {"h_chain": Settings(), "h_next": Settings(staleness=0.2, next=1 / 3)}

PATTERN = r"h_chain\(c=(ancestors|e_star), *s=(0|1|0?\.\d+), *next=(0|1|0?\.\d+), *released=(first|alike)\)"
FORM = "h_chain(c=ancestors|e_star,s=0…1,next=0…1,released=first|alike)"


def parse(name: str) -> Settings | None:
    """The settings that a heuristic's name stands for, None if it is not one of ours."""
    if name in NAMED:
        return NAMED[name]
    if found := re.fullmatch(PATTERN, name):
        cost, staleness, following, released = found.groups()
        return Settings(cost, float(staleness), float(following), released == "first")
    return None


def score_of(settings: Settings) -> Callable[[int, int, float, float], float]:
    """c / (m · s^S): the rest is the search's."""
    exponent = settings.staleness
    if not exponent:
        return _ageless

    def score(size: int, staleness: int, cost: float, projected_cost: float) -> float:
        found: float = projected_cost / (size * staleness**exponent)
        return found

    return score


def _ageless(size: int, staleness: int, cost: float, projected_cost: float) -> float:
    return projected_cost / size
