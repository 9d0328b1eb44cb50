"""When each storage is used next, as the step before had it.

Training repeats itself. Of one step the operators are kept, and for each storage that an operator reads or
makes, when the step used it next. In later steps the operators are compared one by one with those: where they
are the same, the position in the sequence tells the next uses; where they are not, nothing is foreseen until
the last few operators are found in the sequence again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

JOIN = 4
"""So many operators in a row must be as recorded to go on from there."""


@dataclass
class Step:
    """One step's operators. Times are sums of the costs of the operators before, without recomputation."""

    keys: list[Hashable] = field(default_factory=list)
    """What an operator is known by: its name and the sizes that it works on, say."""
    times: list[int] = field(default_factory=list)
    """When each began."""
    next_uses: list[tuple[int | None, ...]] = field(default_factory=list)
    """For each storage that it reads and then each that it makes: when it is used next, None for never."""
    length: int = 0
    """Time of the whole step."""


def step_of(operators: Iterable[tuple[Hashable, Sequence[Hashable], int]], kept: Iterable[Hashable]) -> Step:
    """operators: each as its key, the storages that it reads and makes, and its cost.

    kept: the storages that are wanted at the step's end.
    """
    step = Step()
    storages: list[Sequence[Hashable]] = []
    for key, touched, cost in operators:
        step.keys.append(key)
        step.times.append(step.length)
        storages.append(touched)
        step.length += cost
    following: dict[Hashable, int] = dict.fromkeys(kept, step.length)
    for time, touched in zip(reversed(step.times), reversed(storages), strict=True):
        step.next_uses.append(tuple([following.get(one) for one in touched]))
        following.update(dict.fromkeys(touched, time))
    step.next_uses.reverse()
    return step


class Foresight:
    """Follows a step that goes on, operator by operator."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.position: int | None = 0
        """The time of the recorded step that this one has come to; None while it is lost."""
        self.lost = 0
        """How many operators went by without a place in the sequence."""
        self._next = 0
        self._last: deque[Hashable] = deque(maxlen=JOIN)
        self._places: dict[tuple[Hashable, ...], list[int]] = {}
        keys = step.keys
        for end in range(JOIN, len(keys) + 1):
            self._places.setdefault(tuple(keys[end - JOIN : end]), []).append(end - 1)

    @property
    def horizon(self) -> int:
        """What counts as the distance of a next use that is not to be: further than any other."""
        return 2 * self.step.length

    def follow(self, key: Hashable) -> tuple[int | None, ...] | None:
        """The next operator: the next uses of what it reads and makes, or None if that is not known."""
        step, place = self.step, self._next
        self._last.append(key)
        if self.position is None or place >= len(step.keys) or step.keys[place] != key:
            found = self._join()
            if found is None:
                self.position = None
                self.lost += 1
                return None
            place = found
        self._next = place + 1
        self.position = step.times[place]
        return step.next_uses[place]

    def again(self) -> None:
        """A new step begins."""
        self._next = 0
        self.position = 0
        self._last.clear()

    def _join(self) -> int | None:
        """The last of the last few operators' places in the sequence, the first from where it was left."""
        if len(self._last) < JOIN:
            return None
        places = self._places.get(tuple(self._last), ())
        return next((place for place in places if place > self._next + JOIN - 2), None)
