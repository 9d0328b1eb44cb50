"""Where replays run on a GPU, and how the ledger gets memory there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.runtime import storage
from dtrrun.runtime.guards import below


class home(below):
    """Context: `below`, on the stream on which the program computes.

    What is evicted was computed there, and its memory belongs to that stream's pool in the allocator. A side
    stream that asks for it waits for the replay, on the GPU; the replay for what the side stream was given.
    The current device is ours, too: `torch.zeros(device="cuda")` is recorded without an index.
    """

    __slots__ = ("_came_from", "_device", "_side")

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._came_from = self._side = None

    def __enter__(self) -> None:
        if self._modes is not None:
            return
        device = self._device
        if device.capturing:
            # A replay would be captured instead of run; all that fits is brought back before a capture.
            raise device.ledger._too_small(0, "a CUDA graph that reads what is evicted")
        super().__enter__()
        self._came_from = device.gpu.come_from()
        self._side = device.gpu.leave_side_stream() if device.gpu.on_side_stream() else None

    def __exit__(self, *exc: Any) -> None:
        try:
            if self._side is not None:
                self._device.gpu.return_to(self._side)
                self._side = None
            if self._came_from is not None:
                self._device.gpu.go_back(self._came_from)
                self._came_from = None
        finally:
            super().__exit__(*exc)


class Memory:
    """`runtime.storage` for a ledger on a GPU: allocations are tried again when memory runs out."""

    def __init__(self, device: Any) -> None:
        self._attempt: Callable[[Callable[[], Any], str, int], Any] = device.relief.attempt

    def __getattr__(self, name: str) -> Any:
        return getattr(storage, name)

    def refill(self, emptied: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        nbytes = source.nbytes() if storage.REFILL_COPIES else 0
        self._attempt(lambda: storage.refill(emptied, source), "a rematerialization", nbytes)

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        made: torch.UntypedStorage = self._attempt(
            lambda: storage.allocate(nbytes, device), "a rematerialization", nbytes
        )
        return made
