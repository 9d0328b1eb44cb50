"""Optimizer steps: the only sign of a training step's end that every script gives."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class StepClock:
    """Time and memory of each step, and what is done at its end.

    `totals()` gives the running sums (ns by name) from which each step's share is taken.
    """

    def __init__(self, totals: Any, ended: Any) -> None:
        self.count = 0
        self.last: dict[str, int] | None = None
        self._totals = totals
        self._ended = ended
        self._before: dict[str, int] = totals()

    def install(self) -> None:
        def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            self.count += 1
            now = self._totals()
            self.last = {name: now[name] - self._before[name] for name in now}
            self.last["index"] = self.count
            self._before = now
            self._ended()

        self._handle = register_optimizer_step_post_hook(stepped)

    def remove(self) -> None:
        self._handle.remove()

    def slowdown(self) -> float:
        """How many times longer the last step took for recomputation and our own work (1.0: none)."""
        if self.last is None:
            return 1.0
        ours = sum(self.last[name] for name in OVERHEADS)
        return self.last["wall_ns"] / max(self.last["wall_ns"] - ours, 1)


OVERHEADS = ("rematerialization_ns", "scoring_ns", "search_ns", "bookkeeping_ns")
