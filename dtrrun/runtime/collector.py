"""Makes Python's cyclic garbage collector run no more often with a session than without one.

By default it runs whenever 700 more containers have been made than freed. A plain training step makes next to
none; dtrrun's versions and recipes are about ten per operator. On the LSTM and TreeLSTM examples this caused
60 collections a step and, every second step, one of all generations, over everything that torch has imported:
8 % of the run. None of dtrrun's objects are in cycles, so nothing is lost by waiting, and everything is
collected before a budget is found to be too small (`Eviction._collect_garbage`).
"""

from __future__ import annotations

import gc

FACTOR = 64


class Collector:
    """Raises the threshold of the youngest generation while installed."""

    def install(self) -> None:
        self._before = gc.get_threshold()
        self._ours = (self._before[0] * FACTOR, *self._before[1:])
        gc.set_threshold(*self._ours)

    def remove(self) -> None:
        if gc.get_threshold() == self._ours:  # otherwise the program has set its own
            gc.set_threshold(*self._before)
