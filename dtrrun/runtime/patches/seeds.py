"""Makes seeding of the default generators wait while another thread replays a random operator.

A replay sets the generator to the state that its operator saw, and restores the program's state afterwards
(`runtime.rng`). Meanwhile, random operators of other threads wait for their turn, but seeding a generator or
reading its state is not an operator.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from dtrrun.runtime.patches.registry import Function, Patches

NAMES = ("get_rng_state", "initial_seed", "manual_seed", "seed", "set_rng_state")


class Seeds:
    """Patches these functions while installed."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """lock: the session's, under which replays run."""
        self._lock = lock
        self._patches = Patches()

    def install(self) -> None:
        def waiting(original: Function) -> Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._lock:
                    return original(*args, **kwargs)

            return call

        for name in NAMES:
            self._patches.wrap(torch.random, name, waiting)

    def remove(self) -> None:
        self._patches.undo()
