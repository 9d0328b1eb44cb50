"""CUDA graphs: nothing is evicted while one is captured, and what it touches stays where it is.

A captured graph reads and writes fixed addresses whenever it is replayed, and no operator shows it. So all
that fits comes back before a capture, and what the capture touched is handed out for good. Needed as long as
`torch.cuda.CUDAGraph` has no hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.ledger.record import Record
from dtrrun.runtime.patches import Function, Patches

CAPTURED = "what a CUDA graph reads or writes stays in memory, and nothing is recomputed from it"
NO_LIMIT = 1 << 62


class Captures:
    """Patches the begin and the end of captures while installed."""

    def __init__(self, device: Any, warn: Callable[[str], None]) -> None:
        self._device = device
        self._warn = warn
        self._known: set[int] = set()
        self._before: list[Record] = []
        self._limit = self._clock = 0
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
        """Bring back what fits; from now on nothing is evicted, timed or replayed."""
        device, ledger = self._device, self._device.ledger
        if device.capturing or not device.awake:
            return
        with device.careful.lock:
            ledger.drain()
            ledger.restore_all()
            self._before = list(
                ledger.records.values()
            )  # kept, so that no new record gets the id of an old one
            self._known = set(map(id, self._before))
            ledger.clock += 1
            self._clock = ledger.clock  # what is touched from now on was last accessed at this time or later
            self._limit, ledger.limit = ledger.limit, NO_LIMIT
            device.capturing = device.careful.capturing = True
        self._warn(CAPTURED)

    def ended(self) -> None:
        """Hand out what the capture has touched. Raises BudgetError: what was computed from it comes back."""
        device, ledger = self._device, self._device.ledger
        if not device.capturing:
            return
        with device.careful.lock:
            device.capturing = device.careful.capturing = False
            ledger.limit = self._limit
            ledger.drain()
            for record in list(ledger.records.values()):
                if record.resident and (id(record) not in self._known or record.last_access >= self._clock):
                    ledger.expose(record, "CUDA graph")
            self._before.clear()
            self._known.clear()
        device.look()
