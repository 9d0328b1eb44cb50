"""Operators of a session on a GPU: which are retried when out of memory, and what side streams use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtrrun.core.graph import Version
from dtrrun.runtime.cuda.oom_retry import retriable, short_of_memory
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.operators import Operator
from dtrrun.settings import RuntimeSettings

SIDE_STREAM = (
    "tensors that are used on a side stream stay in memory: dtrrun evicts only those of the main stream"
)


class CudaOperators:
    """What a GPU's session knows of operators."""

    def __init__(self, settings: RuntimeSettings, loaded: Callable[[], None]) -> None:
        """loaded: called after calls that may have loaded kernels, or a library."""
        self.loaded = loaded
        self.capturing = False  # a CUDA graph
        self.blind = False  # an allocator without statistics
        self.times = settings.cost == "measured"
        self.side_storages = 0
        self._tells: bool | None = None

    def connect(self, callbacks: Callbacks, device: Any, warn: Callable[[str], None]) -> None:
        """Connect to a session. device: its `Cuda`."""
        self._callbacks, self._ledger, self._device, self._warn = callbacks, callbacks.ledger, device, warn

    def tells_of_blocks(self) -> bool:
        """Return whether the allocator tells of the blocks that it hands out."""
        if self._tells is None:
            self._tells = bool(self._callbacks.native.tells_of_blocks())
        return self._tells

    def state(self) -> tuple[Any, int]:
        """Return the allocator's statistics, and how often it has caused evictions."""
        retry = self._device.retry
        return self._device.present.gpu.statistics(), retry.retries + retry.flushes.avoided

    def pin_side(self, versions: Sequence[Version], results: Sequence[torch.Tensor]) -> None:
        """Pin what two streams use, because neither could safely free it."""
        touched = [self._ledger.versions.get(version.key) for version in versions]
        touched += map(self._callbacks.version_of, results)
        for version in touched:
            if version is None:
                continue
            self._ledger.fix(version)
            if version.operation is not None:
                self._callbacks.dtr.recipes.make_constant(version, "side stream")
                self.side_storages += 1
                self._warn(SIDE_STREAM)

    def taken(self, before: tuple[Any, int]) -> int:
        """Return the bytes that a call has used at its peak since that `state`."""
        return _taken(before, self.state())

    def can_retry(self, operator: Operator, error: BaseException, random_state_known: bool = False) -> bool:
        """Return whether an operator of the program that raised `error` will run again."""
        return (
            not self.capturing
            and short_of_memory(error, self._device.present.gpu.index)
            and self._ledger.budget_bytes is not None
            and retriable(operator, random_state_known=random_state_known)
        )


def _taken(before: tuple[Any, int], after: tuple[Any, int]) -> int:
    """Return the bytes that a call used at its peak, or slightly more, without resetting statistics.

    There are two bounds: everything allocated by the call, and how far the peak is above the initial memory.
    The second is exact if the call has raised the peak, and too low if something was evicted in between.
    """
    (first, evictions), (last, evictions_now) = before, after
    total = last.total - first.total
    return int(total if evictions_now != evictions else min(total, last.peak - first.allocated))
