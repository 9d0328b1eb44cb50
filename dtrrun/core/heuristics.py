"""The paper's eviction heuristics: the storage with the lowest score is evicted (Sec. 2, 4.1, App. A, C, D).

    c(t)^C / [m(t)^M · s(t)^S]

m(t) is the size in bytes; s(t) the time since the last access, at least 1, so that a storage that was touched
just now scores highest without a division by zero; and c(t) the projected cost: c_0(t), the cost of the
operators that made it, plus the costs of its evicted neighbourhood. Scores are computed in C++
(`policy/heuristic.h`).

A user's function, `module:function`, has the signature

    score(size, staleness, cost, projected_cost) -> number

with `cost` for c_0(t), both costs and the staleness in units of the clock. It may set the neighbourhood of
its projected cost in an attribute: `score.neighbourhood = "e_star"` (exact, expensive), `"ancestors"`,
`"eqclass"` (the default) or `"none"` (free; the projected cost is then the cost).
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from dtrrun.core import chain

Neighbourhood = Literal["none", "ancestors", "e_star", "eqclass"]
"""Which evicted storages a projected cost includes: none, e_R, e*, or the relaxation ẽ*."""

Score = Callable[[int, int, int, int], float]


@dataclass(frozen=True)
class Heuristic:
    """How storages are scored: by `powers` or by a function."""

    name: str
    """As given to `make_heuristic`."""
    neighbourhood: Neighbourhood
    powers: tuple[int, int, float] | None = None
    """The exponents C, M and S. C and M are 0 or 1; S is from 0 to 1, where an int makes scores exact."""
    score: Score | None = None
    """In place of powers. All storages are scored for each choice."""
    released: float = 1.0
    """Factor on the score of a storage that the program has released."""
    foresight: float = 0.0
    """Exponent of the predicted time until the next use, which divides the score."""


_NAMED = {
    heuristic.name: heuristic
    for heuristic in (
        Heuristic("h_dtr", "e_star", (1, 1, 1)),  # Sec. 4.1, like the next three
        Heuristic("h_dtr_eq", "eqclass", (1, 1, 1)),
        Heuristic("h_dtr_local", "none", (1, 1, 1)),
        Heuristic("lru", "none", (0, 0, 1)),
        Heuristic("size", "none", (0, 1, 0)),  # GreedyRemat (Sec. 4.1)
        Heuristic("msps", "ancestors", (1, 1, 0)),  # Sec. 4.1
        Heuristic("e_star", "e_star", (1, 1, 0)),  # |e*(t)| + 1 if all costs and sizes are 1 (App. A)
    )
}

AUTO = "auto"
"""In place of a heuristic: the run finds the best one itself (`runtime.observe.learning`)."""
INITIAL = "h_dtr_eq"
"""What such a run begins with, and keeps where no step is like another."""
STEADY = chain.Settings("ancestors", 0.6, 0.0, False).name
"""What it takes once steps repeat, or one recomputes too much. It does well with most programs and stands for
`AUTO` where nothing is learned."""

HEURISTIC_NAMES = (*_NAMED, "random", *chain.NAMED)
"""Those of Sec. 3 and 4.1, and `chain`'s. `ABLATION_NAMES` and `module:function` are accepted too."""

ABLATION_NAMES = tuple(
    f"h'(s={s},m={m},c={c})"
    for c in ("e_star", "eqclass", "local", "no")
    for s in ("yes", "no")
    for m in ("yes", "no")
)
"""Every combination of h'(s, m, c) of App. D.1."""

_ABLATION = re.compile(r"h['′]\(s=(yes|no), *m=(yes|no), *c=(e_star|eqclass|local|no)\)")
_FUNCTION = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<function>[^\W\d]\w*)")


def check_heuristic(name: str) -> None:
    """Raise ValueError if `make_heuristic(name)` would, without importing the user's module."""
    known = name in HEURISTIC_NAMES or _ABLATION.fullmatch(name) or chain.parse(name)
    if not known and not _FUNCTION.fullmatch(name):
        raise ValueError(
            f"unknown heuristic {name!r}: choose one of {', '.join(HEURISTIC_NAMES)}; "
            f"or h'(s=yes|no,m=yes|no,c=e_star|eqclass|local|no); or {chain.FORM}; "
            "or a function of your own, module:function"
        )


def make_heuristic(name: str, seed: int = 0) -> Heuristic:
    """Return the heuristic of that name. seed: for `random`.

    Raises ValueError for an unknown name, or for a user's function that can't be loaded.
    """
    check_heuristic(name)
    if name in _NAMED:
        return _NAMED[name]
    if settings := chain.parse(name):
        return Heuristic(
            name,
            "e_star" if settings.cost == "e_star" else "ancestors",
            (1, 1, settings.staleness or 0),
            released=chain.RELEASED if settings.released_first else 1.0,
            foresight=settings.next,
        )
    if name == "random":
        generator = random.Random(seed)  # separate from the program's generator
        return Heuristic(name, "none", score=lambda *_: generator.random())
    if ablation := _ABLATION.fullmatch(name):  # h'(s, m, c)(t): an ablated measure is 1 (App. D.1)
        s, m, c = ablation.groups()
        neighbourhood: Neighbourhood = "e_star" if c == "e_star" else "eqclass" if c == "eqclass" else "none"
        return Heuristic(name, neighbourhood, (c != "no", m == "yes", s == "yes"))
    return _of_the_user(name)


def _of_the_user(name: str) -> Heuristic:
    module, _, function = name.partition(":")
    try:
        score = getattr(importlib.import_module(module), function)
        float(score(1024, 1000, 10, 20))
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ValueError(f"heuristic {name!r} cannot be used: {type(error).__name__}: {error}") from error
    neighbourhood: Neighbourhood = getattr(score, "neighbourhood", "eqclass")
    if neighbourhood not in get_args(Neighbourhood):
        raise ValueError(
            f"heuristic {name!r}: its attribute neighbourhood is {neighbourhood!r}, "
            f"not one of {', '.join(get_args(Neighbourhood))}"
        )
    return Heuristic(name, neighbourhood, score=score)
