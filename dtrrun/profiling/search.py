"""Searches for the least budget that works, and for the largest value of an option that fits.

Feasibility is not monotonic: a budget can fail although a smaller one works, since other storages are
evicted. So the minimum is a budget that works, like all tried above it, and 5 % below which a run failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def below(budget: int) -> int:
    """Return 5 % less."""
    return budget * 95 // 100


def above(budget: int) -> int:
    """Return the least budget of which `budget` is 5 % less."""
    return -(-budget * 100 // 95)


def least(known: Mapping[int, bool]) -> int | None:
    """Return the least budget tried that worked, and above which all tried did."""
    failed = _failed(known)
    return min((budget for budget, works in known.items() if works and budget > failed), default=None)


def certified(known: Mapping[int, bool]) -> int | None:
    """Return the least budget tried that is a minimum."""
    failed = _failed(known)
    return min(
        (one for one, works in known.items() if works and one > failed and known.get(below(one)) is False),
        default=None,
    )


def find_minimum(check: Callable[[int], bool], guess: int, top: int, known: dict[int, bool]) -> int:
    """Return the minimum in bytes; `top`, which works without evictions, if there is none below.

    check: tries a budget. guess: where to begin. known: earlier results; new ones are added.
    """

    def works(budget: int) -> bool:
        if budget >= top or budget < 1:
            return budget >= 1
        if budget not in known:
            known[budget] = check(budget)
        return known[budget]

    found = _on_ladder(works, max(min(max(guess, 1), top), _failed(known)), top)
    while _failed(known) > found:  # a failure between those tried before
        found = _on_ladder(works, _failed(known), top)
    return found


def _failed(known: Mapping[int, bool]) -> int:
    """Return the largest budget that failed."""
    return max((budget for budget, works in known.items() if not works), default=0)


def _on_ladder(works: Callable[[int], bool], start: int, top: int) -> int:
    """Search among budgets that are 5 % apart, including `start`: in leaps of 1, 2, 4 …, then by halving."""
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


def largest(check: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the largest value from `low` to `high` that fits, the next having failed; None if `low` fails.

    It doubles from `low`, then halves the interval.
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
