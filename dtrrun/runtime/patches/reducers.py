"""Keeps the buckets of DDP's reducer, and its map of used parameters, in memory.

The reducer accesses them without operators. It makes them with operators, in its constructor and when it
rebuilds its buckets, so the ledger would treat them like other results. They are marked as escaped instead:
they stay, and nothing is recomputed from them. Needed as long as the reducer is C++ that accesses memory by
pointer.
"""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.core.graph import Version
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.patches.registry import Function, Patches

MAKE = ("__init__", "_rebuild_buckets")


class Reducers:
    """Patches the reducer while installed."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks, self._dtr, self._ledger = callbacks, callbacks.dtr, callbacks.ledger
        self._patches = Patches()

    def install(self) -> None:
        reducer = getattr(torch.distributed, "Reducer", None)
        for name in MAKE if reducer is not None else ():
            self._patches.wrap(reducer, name, self._making)

    def remove(self) -> None:
        self._patches.undo()

    def _making(self, original: Function) -> Function:
        def patched(reducer: Any, *args: Any, **kwargs: Any) -> Any:
            before = list(self._ledger.versions.values())
            with self._ledger.no_eviction():
                try:
                    return original(reducer, *args, **kwargs)
                finally:
                    self._hand_out(before)

        return patched

    def _hand_out(self, before: list[Version]) -> None:
        """Mark everything made since as escaped.

        before: the versions at that time, kept so that no new one gets the id of an old one.
        """
        known = set(map(id, before))
        with self._callbacks.lock, self._callbacks.telling():
            self._ledger.collect_dead()
            made = [one for one in self._ledger.versions.values() if id(one) not in known]
            self._dtr.mutation.escape_together(made, "handed out")
