"""What C++ asks while operators run again. `core/rematerialize.h` decides when, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from dtrrun.runtime.guards import silently


class Executor:
    """What C++ asks when it runs operators again (`native/replays.h`)."""

    def __init__(self, memory: Any, device: Any, between: Callable[[], None]) -> None:
        """memory: see `core.backend`. device: the session's. between: called between replayed operators."""
        self._memory, self._device, self.between = memory, device, between

    def below(self) -> AbstractContextManager[None]:
        """A context beneath autograd and all modes, where the operators first ran."""
        below: AbstractContextManager[None] = self._device.below()
        return below

    def quietly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function`, suppressing the warnings of its operators."""
        return silently(partial(function, *args))

    def bring_back(self, run: Callable[[], None], nbytes: int) -> None:
        """Call run(), which copies so many bytes back from the host. A GPU has had no memory for them."""
        self._device.run_again(run, nbytes)

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return a new storage with the same content, or None if the system has no memory for it."""
        guard = self.below()
        try:
            with guard, guard:  # twice, because of interrupts
                return self._copy(storage)
        except (RuntimeError, MemoryError):
            return None

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy: torch.UntypedStorage = self._memory.allocate(storage.nbytes(), storage.device)
        copy.copy_(storage)
        return copy
