"""When each storage is used next, according to an earlier step.

Training repeats itself. For one step it is recorded when each storage that the step makes is used. In later
steps a storage is recognised by its place in the sequence: how many operators the step had run when it was
made. So operators cost nothing extra. When memory runs short, the storage made last is compared with the one
at that place in the recorded step. If they differ, nothing is predicted until the last few storages are found
in the recorded sequence again. Their sizes may differ; a place with equal sizes is preferred.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol

JOIN = 4
"""How many storages must match the recorded step, at the same distances, to continue from there; twice as
many if their sizes differ."""
LOOKED_AT = 64
"""How many of the storages made last are searched for them."""


Made = tuple[int, str, int]
"""How a storage is recognised: its age (the number of operators run so far, including its maker), the name of
its maker, and its bytes."""


class Program(Protocol):
    """What is running: the ledger, or a replay."""

    @property
    def age(self) -> int:
        """Number of operators run so far."""

    def made_last(self) -> Iterator[Made]:
        """Yield the existing storages, newest first."""


class Rescued(list[int]):
    """When a storage is used. The last of these times is when weights change, which needs it once more.

    By then the program has released most of what it was computed from. So it should not be evicted at all,
    although its next use is far away.
    """


class WatchedStep:
    """One recorded step. Places number its operators from 0; times are sums of their costs."""

    def __init__(self, begin: int = 0) -> None:
        """begin: how many operators the program had run before the step."""
        self._begin = begin
        self.names: list[str] = []
        self.times: list[int] = []
        """When each operator began."""
        self.length = 0
        """Time of the whole step."""
        self.uses: dict[int, dict[int, list[int]]] = {}
        """When a storage is used, by its maker's place and then by its bytes.

        Storages of one size are merged.
        """
        self.places: dict[str, list[int]] = {}
        """The places of operators that made a storage, by name."""

    def watch(self, program: Program, name: str, cost: int, used: Iterable[Any]) -> None:
        """Record an operator that has run. used: nodes of the policy."""
        age = program.age
        made = [nbytes for born, _, nbytes in takewhile(lambda one: one[0] == age, program.made_last())]
        self.add(age, name, cost, [(one.age, one.nbytes) for one in used], made)

    def add(
        self, age: int, name: str, cost: int, used: Iterable[tuple[int, int]], made: Iterable[int]
    ) -> None:
        """Record the operator that brought the program's count to `age`.

        used: ages and bytes of the storages that it reads. made: bytes of those that it makes.
        """
        place = age - self._begin - 1
        while len(self.names) < place:  # views, and other operators that were not reported
            self.names.append("")
            self.times.append(self.length)
        self.names.append(name)
        self.times.append(self.length)
        uses: dict[int, list[int]] = {nbytes: [] for nbytes in made}
        if uses:
            self.uses[place] = uses
            self.places.setdefault(name, []).append(place)
        self.use(used)
        self.length += cost

    def use(self, storages: Iterable[tuple[int, int]]) -> None:
        """Record that the program uses storages of these ages and bytes now."""
        for age, nbytes in storages:
            uses = self.uses.get(age - self._begin - 1, {}).get(nbytes)
            if uses is not None and uses[-1:] != [self.length]:
                uses.append(self.length)

    def end(self, rescued_since: Callable[[int], Iterable[Any]]) -> None:
        """Note what was rescued, when the step ends, or the one after it, which may change other weights.

        rescued_since: gives the nodes made since an age that can't be recomputed any more because what they
        read has changed. They had to be in memory when it changed, even if the program had last used them
        long before.
        """
        for one in rescued_since(self._begin):
            made = self.uses.get(one.age - self._begin - 1, {})
            if one.nbytes in made and type(made[one.nbytes]) is not Rescued:
                made[one.nbytes] = Rescued([*made[one.nbytes], self.length])

    def has(self, place: int, name: str, nbytes: int | None = None) -> bool:
        """Return whether an operator of this name made a storage at `place`, and of that size if given."""
        made = self.uses.get(place)
        return made is not None and self.names[place] == name and (nbytes is None or nbytes in made)

    def uses_of(self, place: int, nbytes: int) -> Sequence[int] | None:
        """Return when a storage made at `place` is used; None if none was made there."""
        made = self.uses.get(place)
        if not made:
            return None
        return made[nbytes] if nbytes in made else sorted({time for uses in made.values() for time in uses})

    def to_values(self) -> dict[str, Any]:
        """Return what `from_values` reads, in types that JSON supports."""
        uses = [
            [place, nbytes, type(times) is Rescued, times]
            for place, made in self.uses.items()
            for nbytes, times in made.items()
        ]
        return {"names": self.names, "times": self.times, "length": self.length, "uses": uses}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> WatchedStep:
        """Undo `to_values`. Raises KeyError, TypeError, ValueError or IndexError for other values."""
        step = cls()
        step.names, step.times = [str(name) for name in values["names"]], [int(t) for t in values["times"]]
        step.length = int(values["length"])
        for place, nbytes, rescued, times in values["uses"]:
            made = step.uses.setdefault(place, {})
            if not made:
                step.places.setdefault(step.names[place], []).append(place)
            made[nbytes] = Rescued(times) if rescued else times
        return step

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WatchedStep)
            and self.names == other.names
            and self.uses.keys() == other.uses.keys()
        )

    __hash__ = None  # type: ignore[assignment]


class _Stretch(NamedTuple):
    """From `age` on, the program runs as `step` did; its place 0 corresponds to the age `origin` + 1."""

    age: int
    origin: int
    step: WatchedStep | None


class Foresight:
    """Follows a recorded step while the program runs."""

    def __init__(self, program: Program, steps: Sequence[WatchedStep] = ()) -> None:
        """steps: recorded ones. The program is beginning a step."""
        self._program = program
        self.steps = list(steps)
        """If there are several kinds of steps, they are in the order in which they alternate."""
        self._stretches: list[_Stretch] = []
        self.looks = self.lost = 0
        """How often the position in this step was asked for, and how often it was unknown."""
        self.begin()

    def begin(self) -> None:
        """Start to follow a new step."""
        followed = next((one.step for one in reversed(self._stretches) if one.step is not None), None)
        last = next((place for place, step in enumerate(self.steps) if step is followed), -1)
        self._in_turn = self.steps[last + 1 :] + self.steps[: last + 1]
        self._begin = self._program.age
        self._stretches = [_Stretch(self._begin, self._begin, None)]
        self._reached = -1
        """The last place in a recorded step that the program is known to have reached."""
        self._retry = 0
        self.position: int | None = None
        """The time of the recorded step at this place; None if nothing is predicted."""
        self.horizon = 1
        """The distance of a storage that is not used again: greater than any other."""
        self.looks = self.lost = 0

    def look(self) -> bool:
        """Find the position. Returns whether it changed other than by moving forward."""
        self.looks += 1
        before = stretch = self._stretches[-1]
        newest = next(self._program.made_last(), None)
        if newest is not None and newest[0] > self._begin:
            place = newest[0] - stretch.origin - 1
            if stretch.step is None or not stretch.step.has(place, newest[1]):
                self._join(newest)
                stretch = self._stretches[-1]
            if stretch.step is not None:
                self._reached = newest[0] - stretch.origin - 1
        step, place = stretch.step, self._program.age - stretch.origin
        if step is None or place >= len(step.times):
            self.position = None
            self.lost += 1
        else:
            self.position, self.horizon = step.times[place], 2 * step.length
        return stretch is not before

    def now(self) -> tuple[int | None, int, int, list[_Stretch]]:
        """Return what `bindings/foresight.h` needs to tell when a storage is used next."""
        return self.position, self.horizon, self._begin, self._stretches

    def _join(self, newest: Made) -> None:
        """Continue where the last storages occur in a recorded step, or mark the position unknown."""
        age = newest[0]
        if age < self._retry:
            return
        last = self._stretches[-1]
        found = self._from_the_begin(newest) or self._ahead()
        if found is not None:
            self._stretches.append(found)
        else:
            self._retry = age + JOIN
            if last.step is not None:  # from the last place known to match
                self._stretches.append(_Stretch(last.origin + self._reached + 2, last.origin, None))

    def _from_the_begin(self, newest: Made) -> _Stretch | None:
        """Find a step that matches from its first operator on. Only tried while no step has matched."""
        if len(self._stretches) > 1:
            return None
        age, name, nbytes = newest
        for step in self._in_turn:
            if step.has(age - self._begin - 1, name, nbytes):
                return _Stretch(self._begin, self._begin, step)
        return None

    def _ahead(self) -> _Stretch | None:
        """Find the first place, after the reached one, where the last few storages occur in a step."""
        recent: list[Made] = []
        for one in islice(self._program.made_last(), LOOKED_AT):
            if len(recent) < 2 * JOIN and one[0] > self._begin and (not recent or one[0] < recent[-1][0]):
                recent.append(one)
        if len(recent) < JOIN:
            return None
        newest, alike = recent[0][0], None
        first = self._reached + newest - recent[JOIN - 1][0]
        (second, before, _) = recent[1]
        for step in self._in_turn:
            places = step.places.get(recent[0][1], [])
            for place in islice(places, bisect_right(places, first), None):
                begin = place - newest
                if step.names[begin + second] != before:  # most places fail here, so this should be fast
                    continue
                if all(step.has(begin + age, name, nbytes) for age, name, nbytes in recent[:JOIN]):
                    return self._stretch(recent[JOIN - 1], begin, step)
                if alike is None and all(step.has(begin + age, name) for age, name, _ in recent):
                    alike = self._stretch(recent[-1], begin, step)
        return alike if len(recent) == 2 * JOIN else None

    def _stretch(self, first: Made, begin: int, step: WatchedStep) -> _Stretch:
        return _Stretch(max(first[0], self._stretches[-1].age), -begin - 1, step)
