"""When each storage is used next, as an earlier step had it.

Training repeats itself. One step is watched: when it uses each storage that it makes. In later steps a
storage is known again by its place in the sequence: how many operators the step had run when it was made. So
nothing has to be done while operators run. When memory runs short, what the program made last is compared
with what stands there in the sequence of the step that was watched; where that is something else, nothing is
foreseen until the last few storages are found in that sequence again. Sizes may be others: of several places
that would do, one with the same sizes is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol

JOIN = 4
"""So many storages must have been made as in the step that was watched, at the same distances, to go on from
there; twice as many where their sizes are others."""
LOOKED_AT = 64
"""Of the storages that were made last, in search of those."""


Made = tuple[int, str, int]
"""A storage as it is known again: its age, which is how many operators the program had run, its maker
included; the maker's name; its bytes."""


class Program(Protocol):
    """What runs: the ledger, or a replay."""

    @property
    def age(self) -> int:
        """Operators run so far."""

    def made_last(self) -> Iterator[Made]:
        """The storages that there are, the newest first."""


class Step:
    """One step as it was watched. Places count its operators from 0; times are sums of their costs."""

    def __init__(self, begin: int = 0) -> None:
        """begin: operators that the program had run before."""
        self._begin = begin
        self.names: list[str] = []
        self.times: list[int] = []
        """When each operator began."""
        self.length = 0
        """Time of the whole step."""
        self.uses: dict[int, dict[int, list[int]]] = {}
        """By the maker's place, then by bytes: when such a storage is used. Those of a size count as one."""
        self.places: dict[str, list[int]] = {}
        """By name, of operators that made a storage."""

    def watch(self, program: Program, name: str, cost: int, used: Iterable[Any]) -> None:
        """An operator has run. used: nodes of the policy."""
        age = program.age
        made = [nbytes for born, _, nbytes in takewhile(lambda one: one[0] == age, program.made_last())]
        self.add(age, name, cost, [(one.age, one.nbytes) for one in used], made)

    def add(
        self, age: int, name: str, cost: int, used: Iterable[tuple[int, int]], made: Iterable[int]
    ) -> None:
        """The operator with which the program had run `age`.

        used: ages and bytes of the storages that it reads. made: bytes of those that it makes.
        """
        place = age - self._begin - 1
        while len(self.names) < place:  # views, and others of which nothing was told
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
        """The program uses storages of these ages and bytes now."""
        for age, nbytes in storages:
            uses = self.uses.get(age - self._begin - 1, {}).get(nbytes)
            if uses is not None and uses[-1:] != [self.length]:
                uses.append(self.length)

    def has(self, place: int, name: str, nbytes: int | None = None) -> bool:
        """Whether that operator made a storage at `place`, of so many bytes if that is given."""
        made = self.uses.get(place)
        return made is not None and self.names[place] == name and (nbytes is None or nbytes in made)

    def uses_of(self, place: int, nbytes: int) -> Sequence[int] | None:
        """When a storage that was made at `place` is used; None: none was."""
        made = self.uses.get(place)
        if not made:
            return None
        return made[nbytes] if nbytes in made else sorted({time for uses in made.values() for time in uses})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self.names == other.names and self.uses.keys() == other.uses.keys()

    __hash__ = None  # type: ignore[assignment]


class _Stretch(NamedTuple):
    """From an age on, the program goes as `step` went: its place 0 would have had the age `origin` + 1."""

    age: int
    origin: int
    step: Step | None


class Foresight:
    """Follows a step that goes on."""

    def __init__(self, program: Program, steps: Sequence[Step] = ()) -> None:
        """steps: what is known; the program begins one now."""
        self._program = program
        self.steps = list(steps)
        """Those of several kinds, where there are such, in the order in which they come by turns."""
        self._stretches: list[_Stretch] = []
        self.looks = self.lost = 0
        """How often it was asked for the position in this step, and how often it did not know it."""
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        followed = next((one.step for one in reversed(self._stretches) if one.step is not None), None)
        last = next((place for place, step in enumerate(self.steps) if step is followed), -1)
        self._in_turn = self.steps[last + 1 :] + self.steps[: last + 1]
        self._begin = self._program.age
        self._stretches = [_Stretch(self._begin, self._begin, None)]
        self._reached = -1
        """The last place in a recorded step of which it is known that the program was there."""
        self._retry = 0
        self.position: int | None = None
        """The time that the recorded step had at this place; None: nothing is foreseen."""
        self.horizon = 1
        """What counts as the distance of a next use that is not to be: further than any other."""
        self.looks = self.lost = 0

    def look(self) -> bool:
        """Find the position; whether that changes more than by going on."""
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

    def next_use(self, node: Any) -> int | None:
        """When the program uses `node` next, None if no more. Of one that is not known: half a step ahead."""
        position = self.position
        assert position is not None
        if node.age <= self._begin:
            return None
        uses = getattr(node, "uses", None)
        if uses is None:
            uses = self._uses_of(node)
            if uses is None:
                return position + self.horizon // 4
            node.uses = uses
        place = bisect_right(uses, position)
        return uses[place] if place < len(uses) else None

    def _uses_of(self, node: Any) -> Sequence[int] | None:
        stretches = self._stretches
        stretch = stretches[bisect_right(stretches, node.age, key=lambda one: one.age) - 1]
        if stretch.step is None:
            return None
        return stretch.step.uses_of(node.age - stretch.origin - 1, node.nbytes)

    def _join(self, newest: Made) -> None:
        """Go on from where the storages that were made last stand in a recorded step; or be lost."""
        age = newest[0]
        if age < self._retry:
            return
        last = self._stretches[-1]
        found = self._from_the_begin(newest) or self._ahead()
        if found is not None:
            self._stretches.append(found)
        else:
            self._retry = age + JOIN
            if last.step is not None:  # from what was last found to be as it should be
                self._stretches.append(_Stretch(last.origin + self._reached + 2, last.origin, None))

    def _from_the_begin(self, newest: Made) -> _Stretch | None:
        """A step that has gone like this from its first operator on; asked before any other was found."""
        if len(self._stretches) > 1:
            return None
        age, name, nbytes = newest
        for step in self._in_turn:
            if step.has(age - self._begin - 1, name, nbytes):
                return _Stretch(self._begin, self._begin, step)
        return None

    def _ahead(self) -> _Stretch | None:
        """The first place, after what has been reached, where the last few storages stand in a step."""
        recent: list[Made] = []
        for one in islice(self._program.made_last(), LOOKED_AT):
            if len(recent) < 2 * JOIN and one[0] > self._begin and (not recent or one[0] < recent[-1][0]):
                recent.append(one)
        if len(recent) < JOIN:
            return None
        newest, alike = recent[0][0], None
        for step in self._in_turn:
            for place in step.places.get(recent[0][1], ()):
                begin = place - newest
                if begin + recent[JOIN - 1][0] <= self._reached:
                    continue
                if all(step.has(begin + age, name, nbytes) for age, name, nbytes in recent[:JOIN]):
                    return self._stretch(recent[JOIN - 1], begin, step)
                if alike is None and all(step.has(begin + age, name) for age, name, _ in recent):
                    alike = self._stretch(recent[-1], begin, step)
        return alike if len(recent) == 2 * JOIN else None

    def _stretch(self, first: Made, begin: int, step: Step) -> _Stretch:
        return _Stretch(max(first[0], self._stretches[-1].age), -begin - 1, step)
