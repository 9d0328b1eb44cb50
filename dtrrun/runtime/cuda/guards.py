"""Where replays run on a GPU, and how the ledger gets memory there."""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.runtime import storage
from dtrrun.runtime.guards import below


class on_main_stream(below):
    """Context: `below`, on the program's main stream and device.

    Evicted tensors were computed on that stream, and their memory belongs to its pool in the allocator. A
    side stream that needs one waits for the replay, on the GPU; the replay waits for the inputs of the side
    stream. The device must be current, since `torch.zeros(device="cuda")` is recorded without an index.
    """

    __slots__ = ("_came_from", "_device", "_sides")

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._came_from: int | None = None
        self._sides: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        if self._modes is not None:
            return
        device = self._device
        if device.capturing:
            # A replay would be captured instead of run. What fits was brought back before the capture.
            raise device.callbacks.dtr.eviction.too_small(0, "a CUDA graph that reads what is evicted")
        super().__enter__()
        self._came_from = device.gpu.come_from()
        for part in reversed(device.parts):  # the first one last, so that it is current
            if part.gpu.on_side_stream():
                self._sides.append((part.gpu, part.gpu.leave_side_stream()))
                device.gpu.come_from()

    def __exit__(self, *exc: Any) -> None:
        try:
            while self._sides:
                gpu, side = self._sides.pop()
                gpu.return_to(side)
                self._device.gpu.come_from()
            if self._came_from is not None:
                self._device.gpu.go_back(self._came_from)
                self._came_from = None
        finally:
            super().__exit__(*exc)


class CudaMemory:
    """`runtime.storage` for a ledger on a GPU: allocations are retried when memory runs out."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(storage, name)

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        made: torch.UntypedStorage = self._device.retry.attempt(
            lambda: storage.allocate(nbytes, device), "a rematerialization", nbytes
        )
        return made
