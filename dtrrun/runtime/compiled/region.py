"""A compiled graph that is not looked into: its inputs stay in memory while it runs, its results for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Region:
    """Replaces the function of a generated module that runs the whole graph.

    It is called with a list of inputs, which it empties.
    """

    def __init__(self, call: Callable[[list[Any]], Any]) -> None:
        self._call = call
        self._lock: Callable[[list[torch.Tensor]], Callable[[], None]] | None = None
        self._written: Callable[[torch.Tensor], None] | None = None
        self._called: Callable[[], None] | None = None
        self.mutated: tuple[int, ...] = ()
        """Positions of the inputs that it writes to."""

    def begin(
        self,
        lock: Callable[[list[torch.Tensor]], Callable[[], None]],
        written: Callable[[torch.Tensor], None],
        called: Callable[[], None],
    ) -> None:
        """Begin a session. lock: keeps tensors in memory, and returns a function that unlocks them. written:
        called with each tensor that is about to be written to. called: called once, at the first call."""
        self._lock, self._written, self._called = lock, written, called

    def end(self) -> None:
        """End the session."""
        self._lock = self._written = self._called = None

    def __call__(self, inputs: list[Any]) -> Any:
        if self._lock is None or self._written is None:
            return self._call(inputs)
        if self._called is not None:
            self._called()
            self._called = None
        unlock = self._lock([one for one in inputs if isinstance(one, torch.Tensor)])
        try:
            for place in self.mutated:
                if isinstance(one := inputs[place], torch.Tensor):
                    self._written(one)
            return self._call(inputs)
        finally:
            unlock()
