"""A network of the theorems as an operator log."""

from __future__ import annotations

from collections.abc import Sequence

from dtrrun.simulator.log import Call, Constant, Instruction, Release
from dtrrun.simulator.schedule import Schedule, schedule_of

from .linear import linear
from .replayed import OPERATOR


class Recorded:
    """An `Engine` without a budget that records its calls."""

    def __init__(self) -> None:
        self.log: list[Instruction] = []
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def compute(self, inputs: Sequence[str]) -> str:
        name = self._name()
        self.log.append(Call(OPERATOR, tuple(inputs), (name,), (1,), (-1,), 1))
        return name

    def resident(self, handle: str) -> bool:
        return True

    def release(self, handle: str) -> None:
        self.log.append(Release(handle))

    def constant(self) -> str:
        name = self._name()
        self.log.append(Constant(name, 1))
        return name


def linear_schedule(layers: int) -> Schedule:
    """Return the network of App. A: its storages are t_1 … t_N and t̂_N … t̂_1, in this order, of one byte
    each."""
    recorded = Recorded()
    linear(recorded, layers)
    return schedule_of(recorded.log, f"linear {layers}")
