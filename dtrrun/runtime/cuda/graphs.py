"""CUDA graphs: nothing is evicted during a capture, and what it uses stays where it is.

A captured graph reads and writes fixed addresses when it is replayed, and no operator shows these accesses.
So what fits is brought back before a capture, and what the capture used is marked as escaped. Needed as long
as `torch.cuda.CUDAGraph` has no hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.core.graph import Version
from dtrrun.runtime.patches.registry import Function, Patches

CAPTURED = "what a CUDA graph reads or writes stays in memory, and nothing is recomputed from it"


class Captures:
    """Patches the beginning and the end of captures while installed."""

    def __init__(self, device: Any, warn: Callable[[str], None]) -> None:
        self._device = device
        self._warn = warn
        self._known: set[int] = set()
        self._before: list[Version] = []
        self._clock = 0
        self._evict_again: Callable[[], None] | None = None
        self._patches = Patches()

    def install(self) -> None:
        graph: Any = getattr(torch.cuda, "CUDAGraph", None)
        if hasattr(graph, "capture_begin") and hasattr(graph, "capture_end"):
            self._patches.wrap(graph, "capture_begin", self._beginning)
            self._patches.wrap(graph, "capture_end", self._ending)

    def remove(self) -> None:
        self._patches.undo()

    def _beginning(self, original: Function) -> Function:
        def capture_begin(captured: Any, *args: Any, **kwargs: Any) -> Any:
            self.began()
            try:
                return original(captured, *args, **kwargs)
            except BaseException:
                self.ended()
                raise

        return capture_begin

    def _ending(self, original: Function) -> Function:
        def capture_end(captured: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(captured, *args, **kwargs)
            finally:
                self.ended()

        return capture_end

    def began(self) -> None:
        """Bring back what fits. Until the capture ends, nothing is evicted, timed or replayed."""
        device, ledger, callbacks = self._device, self._device.ledger, self._device.callbacks
        if device.capturing or not device.awake:
            return
        with callbacks.lock:
            ledger.collect_dead()
            callbacks.dtr.rematerializer.restore_all()
            # Kept so that no new version gets the id of an old one.
            self._before = list(ledger.versions.values())
            self._known = set(map(id, self._before))
            ledger.clock += 1
            self._clock = ledger.clock  # what the capture uses has a last access at or after this time
            self._evict_again = ledger.no_eviction()
            device.operators.capturing = callbacks.capturing = True
            if callbacks.dtr.eviction.warn_only:
                device.gpu.set_cap(None)  # until it ends
        self._warn(CAPTURED)

    def ended(self) -> None:
        """Mark as escaped what the capture has used.

        Raises BudgetError if its dependents can't be brought back.
        """
        device, ledger, callbacks = self._device, self._device.ledger, self._device.callbacks
        if not device.capturing:
            return
        with callbacks.lock, callbacks.telling():
            device.operators.capturing = callbacks.capturing = False
            if self._evict_again is not None:
                self._evict_again()
            ledger.collect_dead()
            used = [
                version
                for version in ledger.versions.values()
                if version.resident and (id(version) not in self._known or version.last_access >= self._clock)
            ]
            callbacks.dtr.mutation.escape_together(used, "CUDA graph")
            if callbacks.dtr.eviction.warn_only and not device.retry.lifted:
                device.gpu.set_cap(device.accounts.cap)
            self._before.clear()
            self._known.clear()
        device.pools.exist = True
        device.look()
