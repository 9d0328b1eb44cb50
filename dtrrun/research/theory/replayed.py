"""The simulator's replay as an engine: the program's next operation may depend on what is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from dtrrun.simulator.replay import Replay, Stopped
from dtrrun.simulator.schedule import CONSTANT, Schedule

OPERATOR = "f"


class Replayed:
    """An `Engine` with the replay's own search and bookkeeping (App. C), and App. A's banishing.

    Tensors have one byte and operators take one unit of time, so the clock counts operations.
    """

    def __init__(
        self,
        budget: int,
        heuristic: str = "e_star",
        *,
        most: float = inf,
        previous: Schedule | None = None,
        **options: Any,
    ) -> None:
        """budget: in tensors. most: operations; a program that needs more ends as `thrash`.

        previous: the previous step, known to a heuristic with foresight; if None, it knows nothing. options:
        as for `Replay`. `compute` raises Stopped if nothing is left to evict, or `most` is exceeded.
        """
        self.replay = Replay(
            Schedule("theory"),
            budget,
            heuristic,
            deallocation="banish",
            limit=inf,
            previous=previous,
            **options,
        )
        self.core = self.replay.core
        self._most = most

    @property
    def operations(self) -> int:
        """Return the number of operations, including rematerializations."""
        count: int = self.core.clock
        return count

    def compute(self, inputs: Sequence[int]) -> int:
        made = self._call(OPERATOR, 1, inputs)
        if self.operations > self._most:
            raise Stopped("thrash")
        return made

    def resident(self, handle: int) -> bool:
        resident: bool = self.core.state(handle)[0]
        return resident

    def release(self, handle: int) -> None:
        self.core.release(handle)

    def constant(self) -> int:
        return self._call(CONSTANT, 0, ())

    def _call(self, name: str, cost: int, inputs: Sequence[int]) -> int:
        """Run an operator that makes one tensor, and return its number, which is also its storage's."""
        made: int = self.core.add_storage(1)
        self.core.add_tensor(made, 1)
        operator = self.core.add_operator(name, cost, inputs, (made,), name == CONSTANT)
        status = self.core.call(operator)
        if status != "ok":
            raise Stopped(status)
        return made
