"""h_chain: dtrrun's own heuristics, with and without knowledge of the previous step.

    c(t) / [m(t) · s(t)^S · d(t)^D]

c(t), by default over the evicted ancestors e_R, is the work that evicting t adds: t, and what must be
computed before it. Its evicted descendants, which h_dtr counts, will have to be run whether t is evicted or
not (c=e_star counts them anyway). Staleness s says little about the next use when what was made first is used
last, so only a root of it counts (S is 1/3): it decides near ties at every scale of cost. Storages that the
program has released are evicted first (RELEASED): they are needed only by evicted storages that depend on
them, and those that are needed now are locked.

d(t) is the time until t is next used, by the program or for an evicted descendant, according to the previous
step (`foresight`); if that is unknown, it is 1 for all.
"""

from __future__ import annotations

import re
from typing import NamedTuple

RELEASED = 1e-6
"""Factor on the scores of storages that the program has released, which puts them before all others."""


class Settings(NamedTuple):
    """`staleness`, `next`: the exponents S, from 0 to 1, and D, from 0 to 2.

    With D above 1, what is needed last goes first, even if it costs more.
    """

    cost: str = "ancestors"
    staleness: float = 1 / 3
    next: float = 0.0
    released_first: bool = True

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        for name, settings in NAMED.items():
            if settings == self:
                return name
        released = "first" if self.released_first else "alike"
        return f"h_chain(c={self.cost},s={self.staleness:.3g},next={self.next:.3g},released={released})"


NAMED = {"h_chain": Settings(), "h_next": Settings(staleness=0.2, next=1 / 3)}

PATTERN = (
    r"h_chain\(c=(ancestors|e_star), *s=(0|1|0?\.\d+), *next=(0|1|2|[01]?\.\d+), *released=(first|alike)\)"
)
FORM = "h_chain(c=ancestors|e_star,s=0…1,next=0…2,released=first|alike)"


def parse(name: str) -> Settings | None:
    """Return the settings in a heuristic's name, or None if it is not an h_chain."""
    if name in NAMED:
        return NAMED[name]
    if found := re.fullmatch(PATTERN, name):
        cost, staleness, following, released = found.groups()
        return Settings(cost, float(staleness), float(following), released == "first")
    return None
