"""Python's cyclic garbage collector while a session runs: as seldom as without one.

It runs whenever 700 more containers (by default) have been made than freed. A plain training step makes
next to none; our records and recipes are some ten per operator. On the LSTM and TreeLSTM examples this
meant 60 collections a step and, every second step, one of all generations, over everything that torch
has imported: 8 % of the run. Nothing of ours is in cycles, so nothing is lost by waiting; and before a
budget is found to be too small, everything is collected (`Ledger._collect_garbage`).
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
        if gc.get_threshold() == self._ours:  # else the program has set its own
            gc.set_threshold(*self._before)
