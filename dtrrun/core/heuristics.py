"""The paper's eviction heuristics: the storage with the least score is evicted (Sec. 2, 4.1, App. A, C, D).

Every score has the signature

    score(size, staleness, cost, projected_cost) -> number

size            m(t): bytes, at least 1
staleness       s(t): time since the last access, in units of the clock, at least 1: a storage that was
                touched just now scores highest, without a division by zero
cost            c_0(t): the cost of the operators that made it, in units of the clock
projected_cost  c(t): c_0(t) plus the costs of its evicted neighbourhood

A user's function, `module:function`, has it too. It may set the neighbourhood of its projected cost in an
attribute: `score.neighbourhood = "e_star"` (exact, expensive), `"ancestors"`, `"eqclass"` (the default) or
`"none"` (free; the projected cost is then the cost).
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

Score = Callable[[int, int, float, float], float]


@dataclass(frozen=True)
class Heuristic:
    """A score, and what the search for the least one may assume of it."""

    name: str
    """As `make_heuristic` takes it."""
    score: Score
    neighbourhood: Neighbourhood
    ages: bool
    """The score depends on staleness."""
    ordered: bool = True
    """Staleness enters the score as a divisor (to the power of `exponent`) or not at all, and a greater
    projected cost never lowers it, so the score can be bounded in advance (`search`)."""
    exponent: float = 1.0
    """Exponent of staleness; above 0, at most 1."""
    released: float = 1.0
    """Factor on the score of a storage that the program has released."""
    foresight: float = 0.0
    """Exponent of the predicted time until the next use, which divides the score."""
    powers: tuple[int, int, float] | None = None
    """The exponents of cost, size and staleness, if the score is projected cost / (size * staleness) with
    these: 0 or 1, and for staleness any float. None for other functions, which are not computed natively."""


def h_dtr(size: int, staleness: int, cost: float, projected_cost: float) -> float:
    """c(t) / [m(t) · s(t)], with c over e*, ẽ* or nothing: h_dtr, h_dtr_eq, h_dtr_local (Sec. 4.1)."""
    return projected_cost / (size * staleness)


def lru(size: int, staleness: int, cost: float, projected_cost: float) -> float:
    """1 / s(t) (Sec. 4.1)."""
    return 1 / staleness


def largest(size: int, staleness: int, cost: float, projected_cost: float) -> float:
    """1 / m(t): GreedyRemat (Sec. 4.1)."""
    return 1 / size


def msps(size: int, staleness: int, cost: float, projected_cost: float) -> float:
    """c_R(t) / m(t), c_R over the evicted ancestors e_R (Sec. 4.1)."""
    return projected_cost / size


def e_star(size: int, staleness: int, cost: float, projected_cost: float) -> float:
    """h_{e*}(t) = [c_0(t) + Σ_{e*} c_0] / m(t); |e*(t)| + 1 if all costs and sizes are 1 (App. A)."""
    return projected_cost / size


def h_prime(staleness: bool, size: bool, cost: bool) -> Score:
    """h'(s, m, c)(t) = c(t) / [m(t) · s(t)], where an ablated measure is 1 (App. D.1)."""
    with_s, with_m, with_c = staleness, size, cost

    def score(size: int, staleness: int, cost: float, projected_cost: float) -> float:
        c = projected_cost if with_c else 1
        m = size if with_m else 1
        s = staleness if with_s else 1
        return c / (m * s)

    return score


_NAMED = {
    heuristic.name: heuristic
    for heuristic in (
        Heuristic("h_dtr", h_dtr, "e_star", ages=True, powers=(1, 1, 1)),
        Heuristic("h_dtr_eq", h_dtr, "eqclass", ages=True, powers=(1, 1, 1)),
        Heuristic("h_dtr_local", h_dtr, "none", ages=True, powers=(1, 1, 1)),
        Heuristic("lru", lru, "none", ages=True, powers=(0, 0, 1)),
        Heuristic("size", largest, "none", ages=False, powers=(0, 1, 0)),
        Heuristic("msps", msps, "ancestors", ages=False, powers=(1, 1, 0)),
        Heuristic("e_star", e_star, "e_star", ages=False, powers=(1, 1, 0)),
    )
}

AUTO = "auto"
"""In place of a heuristic: the run finds the best one itself (`runtime.observe.learning`)."""
FIRST = chain.Settings("ancestors", 0.6, 0.0, False).name
"""What it begins with: the one that works in most programs and budgets, without knowledge of any."""

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
            chain.score_of(settings),
            "e_star" if settings.cost == "e_star" else "ancestors",
            ages=settings.staleness > 0,
            exponent=settings.staleness or 1.0,
            released=chain.RELEASED if settings.released_first else 1.0,
            foresight=settings.next,
            powers=(1, 1, settings.staleness or 0),
        )
    if name == "random":
        generator = random.Random(seed)  # separate from the program's generator
        return Heuristic(name, lambda *_: generator.random(), "none", ages=False, ordered=False)
    if ablation := _ABLATION.fullmatch(name):
        s, m, c = ablation.groups()
        score = h_prime(s == "yes", m == "yes", c != "no")
        neighbourhood: Neighbourhood = "e_star" if c == "e_star" else "eqclass" if c == "eqclass" else "none"
        return Heuristic(
            name, score, neighbourhood, ages=s == "yes", powers=(c != "no", m == "yes", s == "yes")
        )
    return _of_the_user(name)


def _of_the_user(name: str) -> Heuristic:
    module, _, function = name.partition(":")
    try:
        score = getattr(importlib.import_module(module), function)
        float(score(1024, 1000, 10, 20.0))
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ValueError(f"heuristic {name!r} cannot be used: {type(error).__name__}: {error}") from error
    neighbourhood: Neighbourhood = getattr(score, "neighbourhood", "eqclass")
    if neighbourhood not in get_args(Neighbourhood):
        raise ValueError(
            f"heuristic {name!r}: its attribute neighbourhood is {neighbourhood!r}, "
            f"not one of {', '.join(get_args(Neighbourhood))}"
        )
    return Heuristic(name, score, neighbourhood, ages=True, ordered=False)
