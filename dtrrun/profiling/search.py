"""Searches for the least budget that works, and for the largest value of an option that fits.

Feasibility is not monotonic: a budget can fail although a smaller one works, since different storages are
evicted. So the minimum is the least budget that worked, as did all larger ones tried. It is certified if a
budget at most 5 % smaller failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

NEARER = 2
"""How often to halve the distance between the peak and a budget 5 % below it that fails: to 1.25 %."""


def below(budget: int) -> int:
    """Return `budget` less 5 %."""
    return budget * 95 // 100


def above(budget: int) -> int:
    """Return the least budget whose `below` is `budget`."""
    return -(-budget * 100 // 95)


def least(known: Mapping[int, bool]) -> int | None:
    """Return the least budget that worked, as did all larger ones tried."""
    failed = _failed(known)
    return min((budget for budget, works in known.items() if works and budget > failed), default=None)


def certified(known: Mapping[int, bool]) -> bool:
    """Return whether the least of them is a minimum that is certified as defined above."""
    found = least(known)
    return found is not None and 0 < below(found) <= _failed(known)


def find_minimum(check: Callable[[int], bool], guess: int, top: int, known: dict[int, bool]) -> int:
    """Return the minimum in bytes; `top`, which works without evictions, if no smaller budget is one.

    If even the budget 5 % below `top` fails, two that are nearer to it are tried.

    check: tries a budget. guess: where to start. known: earlier results; new ones are added.
    """

    def works(budget: int) -> bool:
        if budget >= top or budget < 1:
            return budget >= 1
        if budget not in known:
            known[budget] = check(budget)
        return known[budget]

    found = _on_ladder(works, max(min(max(guess, 1), top), _failed(known)), top)
    while _failed(known) > found:  # an earlier failure between rungs
        found = _on_ladder(works, _failed(known), top)
    for _ in range(NEARER):
        if least(known) is not None or works((_failed(known) + top) // 2):
            break
    return least(known) or top


def _failed(known: Mapping[int, bool]) -> int:
    """Return the largest budget that failed."""
    return max((budget for budget, works in known.items() if not works), default=0)


def _on_ladder(works: Callable[[int], bool], start: int, top: int) -> int:
    """Search budgets spaced 5 % apart, including `start`: in leaps of 1, 2, 4 …, then by bisection."""
    rungs = {0: start}

    def rung(place: int) -> int:
        for known in range(1, place + 1):
            rungs.setdefault(known, below(rungs[known - 1]))
        for known in range(-1, place - 1, -1):
            rungs.setdefault(known, above(rungs[known + 1]))
        return min(rungs[place], top)

    leap, place = 1, 0
    if works(rung(0)):
        while works(rung(place + leap)):
            place, leap = place + leap, 2 * leap
        good, bad = place, place + leap
    else:
        while not works(rung(place - leap)):
            place, leap = place - leap, 2 * leap
        good, bad = place - leap, place
    while bad - good > 1:
        middle = (good + bad) // 2
        if works(rung(middle)):
            good = middle
        else:
            bad = middle
    return rung(good)


def largest_below(check: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return a value near the largest that passes; None if not even `low` does. `high` passes most likely.

    Goes down from `high` in steps of 5 %, and then halves the last step a few times.
    """
    good, bad = high, high + 1
    while not check(good):
        if good == low:
            return None
        good, bad = max(min(below(good), good - 1), low), good
    for _ in range(NEARER):
        middle = (good + bad) // 2
        if middle == good:
            break
        good, bad = (middle, bad) if check(middle) else (good, middle)
    return good


def largest(check: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return a value that fits: `high`, or one from `low` on whose successor fails; None if `low` fails.

    Doubles from `low`, then bisects.
    """
    if not check(low):
        return None
    good, bad = low, high + 1
    while good < high:
        value = min(max(2 * good, good + 1), high) if bad > high else (good + bad) // 2
        if value == good:
            break
        if check(value):
            good = value
        else:
            bad = value
    return good
