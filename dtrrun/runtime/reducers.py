"""DDP's reducer keeps buckets and a map of used parameters, which it reads and writes below every operator.

It makes them by operators, in its constructor and when it rebuilds its buckets, so that the ledger would take
them for results like any other. What is made there is handed out: it stays, and nothing is recomputed from
it. Needed as long as the reducer is C++ that touches memory by pointer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.runtime.patches import Function, Patches

MAKE = ("__init__", "_rebuild_buckets")

Watch = Callable[[], Callable[[], None]]
"""Begins to watch for new storages; what it returns marks them as handed out."""


class Reducers:
    """Patches the reducer while installed."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._patches = Patches()

    def install(self) -> None:
        reducer = getattr(torch.distributed, "Reducer", None)
        for name in MAKE if reducer is not None else ():
            self._patches.wrap(reducer, name, self._making)

    def remove(self) -> None:
        self._patches.undo()

    def _making(self, original: Function) -> Function:
        watch = self._watch

        def patched(reducer: Any, *args: Any, **kwargs: Any) -> Any:
            ended = watch()
            try:
                return original(reducer, *args, **kwargs)
            finally:
                ended()

        return patched
