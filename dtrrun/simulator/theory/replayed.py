"""The simulator's replay as an engine: the program's next operation may depend on what is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from ..nodes import Op, Storage, Tensor
from ..replay import Stopped
from ..schedule import CONSTANT, Schedule
from ..simulate import prepare

OPERATOR = "f"


class Replayed:
    """An `Engine` with the replay's own search and bookkeeping (App. C), and App. A's banishing.

    Tensors are of one byte and operators of one unit of time, so the clock counts operations.
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

        previous: the previous step, known to a heuristic with foresight; None: it knows nothing. options: as
        for `prepare`. `compute` raises Stopped if nothing is left to evict, or `most` is exceeded.
        """
        self.replay = prepare(
            Schedule("theory"),
            budget,
            heuristic,
            deallocation="banish",
            limit=inf,
            previous=previous,
            **options,
        )
        self._most = most

    @property
    def operations(self) -> int:
        """Return the number of operations, including rematerializations."""
        return self.replay.clock

    def compute(self, inputs: Sequence[Tensor]) -> Tensor:
        made = Tensor(Storage(1), 1)
        self.replay.call(Op(OPERATOR, 1, list(inputs), [made]))
        if self.operations > self._most:
            raise Stopped("thrash")
        return made

    def resident(self, handle: Tensor) -> bool:
        return handle.storage.resident

    def release(self, handle: Tensor) -> None:
        self.replay.released(handle.storage)

    def constant(self) -> Tensor:
        made = Tensor(Storage(1), 1)
        self.replay.call(Op(CONSTANT, 0, [], [made]))
        return made
