"""The program's own memory pools (`torch.cuda.MemPool`): what is free in one serves no other requests.

Nor can it be returned to the driver as long as the pool exists. The same holds for the pools of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.runtime.patches.registry import Function, Patches

ENTER, LEAVE = "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"
"""What `torch.cuda.use_mem_pool` calls."""


class Pools:
    """Notices where the program uses its pools, while installed."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._patches = Patches()
        self.inside = 0  # how many of them the program allocates from at present
        self.exist = False  # or have existed, during this session

    def install(self, changed: Callable[[], Any]) -> None:
        """changed: called when the program has begun or ended to allocate from a pool."""
        self._changed = changed
        for name, step in ((ENTER, 1), (LEAVE, -1)):
            self._patches.wrap(torch._C, name, self._passing(step), (torch.cuda.memory, name))

    def remove(self) -> None:
        self._patches.undo()

    def stranded_bytes(self) -> int:
        """Return the free bytes in pools that the program is not using at this moment."""
        return int(self._gpu.stranded_bytes()) if self.exist and not self.inside else 0

    def _passing(self, step: int) -> Callable[[Function], Function]:
        def make(original: Function) -> Function:
            def passes(*args: Any) -> Any:
                result = original(*args)
                self.exist = True
                self.inside = max(self.inside + step, 0)
                self._changed()
                return result

            return passes

        return make
