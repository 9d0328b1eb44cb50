"""What the theorems ask of an engine that rematerializes: the simulator's replay is one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

H = TypeVar("H", bound=Hashable)


class Engine(Protocol[H]):
    """Runs operators of unit cost that make one tensor of unit size each, inside its own budget."""

    def compute(self, inputs: Sequence[H]) -> H:
        """Run a new operator on these tensors, rematerializing those that are evicted."""

    def resident(self, handle: H) -> bool:
        """Whether the tensor is in memory. Not an access."""

    def release(self, handle: H) -> None:
        """The program lets go of the tensor: no later operator names it. It may be banished."""

    def constant(self) -> H:
        """A tensor that is always in memory and counts towards the budget as one unit, as inputs do."""
