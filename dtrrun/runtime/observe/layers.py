"""The course of a step: bytes by class after each operator, and what a plan would make of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from dtrrun.runtime.observe.callers import Call
from dtrrun.runtime.observe.holding import alike
from dtrrun.runtime.observe.plan import Plan, numbered
from dtrrun.telemetry import holding as words

Facts = dict[str, Any]
POINTS = 120
"""How many moments of a step the report has."""
NAMED = 5
"""How many places it names for each."""
MOST_PLACES = 120
PLANS = 3
BEFORE = 3
"""How many operators before a module's backward pass frees the first of its storages it begins, about."""


class Seen(NamedTuple):
    """What a look has found. age: the number of the operator. classes: of the storages that were there."""

    age: int
    nbytes: int
    classes: dict[int, str]
    plans: list[Plan]


class Life(NamedTuple):
    """A storage's time, in numbers of operators from the step's first."""

    key: int
    nbytes: int
    first: int
    last: int
    name: str  # of its class
    age: int  # of its maker, 0 if it was there before
    seen: bool  # at the look


def _freed(lives: list[Life]) -> Iterator[tuple[int, int, int]]:
    """Yield when what was made in a module would not be in memory if that were checkpointed, and its bytes.

    That is from the module's end until its backward pass begins, which is a little before it frees the first.
    """
    ended = max(one.first for one in lives)
    begins = max(min(one.last for one in lives) - BEFORE, ended)
    for one in lives:
        first, last = ended + 1, min(begins, one.last)
        if first <= last:
            yield first, last, one.nbytes


class Step:
    """A step in which storages were noted."""

    def __init__(
        self,
        storages: list[tuple[int, int, int, int, bool]],
        seen: Seen,
        began: int,
        ended: int,
        backward: int,
        backward_ended: int,
    ) -> None:
        """storages: see `CallNotes.storages`. backward, backward_ended: operators; 0: there are none."""
        self._seen, self._began, self._count = seen, began, max(ended - began + 1, 1)
        self._backward, self._backward_ended = backward, backward_ended
        self.lives = [self._life(*one) for one in storages if one[1]]
        self.totals = self._course((one.first, one.last, one.nbytes) for one in self.lives)

    def _life(self, key: int, nbytes: int, born: int, died: int, gradient: bool) -> Life:
        there = born <= self._seen.age and (died < 0 or died >= self._seen.age)
        name = self._seen.classes.get(key, "") if there else ""
        first = max(born - self._began, 0)
        last = self._count - 1 if died < 0 else max(min(died - self._began, self._count - 1), first)
        age = max(born, 0)
        return Life(key, nbytes, first, last, name or self._guess(born, died, gradient), age, there)

    def _guess(self, born: int, died: int, gradient: bool) -> str:
        """Return the class of what was not there when the program's objects were looked at."""
        if gradient:
            return words.GRADIENTS
        if born < 0:
            return words.TEMPORARIES
        if not self._backward:
            return words.TEMPORARIES if died >= 0 else words.KEPT
        if born < self._backward:
            return words.SAVED if died < 0 or died >= self._backward else words.TEMPORARIES
        if died < 0:
            return words.GRADIENTS if born <= self._backward_ended else words.KEPT
        return words.TEMPORARIES

    def _course(self, lives: Any) -> list[int]:
        """Return bytes after each operator."""
        changes = [0] * (self._count + 1)
        for first, last, nbytes in lives:
            changes[first] += nbytes
            changes[last + 1] -= nbytes
        return list(accumulate(changes))[: self._count]

    def layers(self, origin: Callable[[int], Call]) -> Facts:
        """Return the bytes by class at up to `POINTS` moments, each the fullest of its share of the step."""
        moments = self._moments()
        classes: dict[str, list[int]] = {name: [0] * (len(moments) + 1) for name in words.CLASSES}
        places: dict[tuple[str, str, str], list[int]] = {}
        for one in self.lives:
            begin, end = bisect_left(moments, one.first), bisect_right(moments, one.last)
            if begin >= end:
                continue
            called = origin(one.age) if one.age else Call("", "", False)
            place = one.name, alike(called.module), called.line
            for changes in (classes[one.name], places.setdefault(place, [0] * (len(moments) + 1))):
                changes[begin] += one.nbytes
                changes[end] -= one.nbytes
        classes = {name: [*accumulate(changes)][:-1] for name, changes in classes.items()}
        places = {place: [*accumulate(changes)][:-1] for place, changes in places.items()}
        named = sorted(places.items(), key=lambda item: -max(item[1]))[:MOST_PLACES]
        top = []
        for moment in range(len(moments)):
            held = sorted(((values[moment], which) for which, (_, values) in enumerate(named)), reverse=True)
            top.append([[which, nbytes] for nbytes, which in held[:NAMED] if nbytes])
        return {
            "operators": moments,
            "of": self._count,
            "classes": {name: values for name, values in classes.items() if any(values)},
            "backward": max(self._backward - self._began, 0) if self._backward else None,
            "optimizer": self._backward_ended - self._began + 1 if self._backward_ended else None,
            "peak": self._seen.age - self._began,
            "places": [{"class": name, "module": module, "line": line} for (name, module, line), _ in named],
            "top": top,
        }

    def _moments(self) -> list[int]:
        """Return the fullest moment of each share of the step, and that of the look."""
        shares = min(POINTS, self._count)
        found = {self._seen.age - self._began}
        for share in range(shares):
            begin, end = share * self._count // shares, (share + 1) * self._count // shares
            found.add(max(range(begin, end), key=self.totals.__getitem__))
        return sorted(one for one in found if 0 <= one < self._count)

    def plans(self) -> list[Facts]:
        """Return what each plan would save of the step's peak: modules, bytes, and the peak that is left."""
        peak = max(self.totals)
        found: list[Facts] = []
        for plan in self._seen.plans:
            of = {key: module for module, keys in plan.keys.items() for key in keys}
            freed = [one for one in self.lives if one.seen and one.key in of]
            by_module: dict[str, list[Life]] = {}
            for one in freed:
                by_module.setdefault(of[one.key], []).append(one)
            gone = self._course(span for lives in by_module.values() for span in _freed(lives))
            left = max(total - freed for total, freed in zip(self.totals, gone, strict=True))
            if by_module and left < peak:
                found.append(
                    {
                        "modules": numbered(sorted(by_module)),
                        "count": len(by_module),
                        "peak_bytes": left,
                        "saved_bytes": peak - left,
                        "recompute_seconds": plan.seconds,
                    }
                )
        return sorted(found, key=lambda row: row["peak_bytes"])[:PLANS]
