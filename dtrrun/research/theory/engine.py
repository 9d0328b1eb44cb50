"""The interface of a rematerializing engine for the theorems. The simulator's replay is one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

H = TypeVar("H", bound=Hashable)


class Engine(Protocol[H]):
    """Runs operators of unit cost that make one tensor of unit size each, inside its own budget."""

    def compute(self, inputs: Sequence[H]) -> H:
        """Run a new operator on these tensors, rematerializing those that are evicted."""

    def resident(self, handle: H) -> bool:
        """Return whether the tensor is in memory. This does not count as an access."""

    def release(self, handle: H) -> None:
        """Release the tensor: no later operator of the program uses it. It may be banished."""

    def constant(self) -> H:
        """Return a tensor that is always in memory and, like inputs, counts as one unit of the budget."""
