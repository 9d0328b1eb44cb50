"""The program's own limit of the allocator (`set_per_process_memory_fraction`), beside the session's.

While the session limits the allocator, the lower of the two limits holds, and the program reads what it has
set. Nothing of the session's limit is left afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.runtime.patches.registry import Function, Patches

SET, GET = "_cuda_setMemoryFraction", "_cuda_getMemoryFraction"
"""What PyTorch's public functions call: (fraction, device) and (device)."""
set_fraction_of: Any = getattr(torch._C, SET, None)
fraction_of: Any = getattr(torch._C, GET, None)  # None in a PyTorch for CPUs


class Fractions:
    """Both limits, as shares of one device's memory."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._index = -1
        self._ours: float | None = None
        self._standing: float | None = None  # as the allocator reports it
        self.programs = 1.0

    def install(self, changed: Callable[[], Any]) -> None:
        """changed: called after the program has set a limit."""
        self._changed = changed
        self._patches.wrap(torch._C, SET, self._setting)
        self._patches.wrap(torch._C, GET, self._getting)

    def remove(self) -> None:
        self._patches.undo()

    def limit(self, index: int, share: float | None) -> None:
        """Limit the allocator of a device to this share of its memory; None: only as the program does."""
        if self._ours is None:
            self.programs = fraction_of(index)
        self._index, self._ours = index, share
        self._apply()

    def stands(self) -> bool:
        """Return whether the allocator's limit is what it was set to. If not, it becomes the program's."""
        if self._ours is None or (found := fraction_of(self._index)) == self._standing:
            return True
        self.programs = found
        return False

    def _apply(self) -> None:
        share = self.programs if self._ours is None else min(self._ours, self.programs)
        set_fraction_of(share, self._index)
        self._standing = fraction_of(self._index)

    def _setting(self, original: Function) -> Function:
        def set_fraction(fraction: float, index: int) -> None:
            if self._ours is None or index != self._index:
                original(fraction, index)
            else:
                self.programs = fraction
                self._apply()
                self._changed()

        return set_fraction

    def _getting(self, original: Function) -> Function:
        def get_fraction(index: int) -> Any:
            return original(index) if self._ours is None or index != self._index else self.programs

        return get_fraction
