"""Tells other nodes that the budget was too small for a rank here, and learns of it from them.

Their ranks would wait for it: with NCCL for ten minutes, since each node has a torchrun of its own. What the
ranks share is the store in which their process group was made. The launcher of each node ends the ranks that
wait (`launch.ranks`); it learns of the other nodes from a file in its folder of records.
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from contextlib import suppress
from typing import Any

from dtrrun.telemetry.record import world
from dtrrun.telemetry.run import tell_of_another_node

EVERY_SECONDS = 5.0
KEY = "dtrrun: the budget was too small"


class Nodes:
    """For a rank of a program on several nodes; otherwise, does nothing."""

    def __init__(self, record_dir: str | None) -> None:
        size, here = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        self._folder = None if here is None or here == size else record_dir
        self._store: Any = None

    def start(self) -> None:
        """Watch for what the other nodes tell, in the first rank on this one."""
        if self._folder is not None and os.environ.get("LOCAL_RANK") == "0":
            _thread.start_new_thread(self._watch, (self._folder,))  # runs no operators

    def too_small(self) -> None:
        """Tell the others. Called when this rank ends."""
        with suppress(Exception):  # the others may have gone
            if self._folder is not None and (store := self._found()) is not None:
                store.set(KEY, os.environ["RANK"])

    def _found(self) -> Any:
        """Return the store of the process group, if there has been one."""
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if self._store is None and c10d is not None and c10d.is_initialized():
            store = c10d._get_default_store()
            # A connection of its own: in the program's, another thread may be waiting.
            self._store = store.clone() if hasattr(store, "clone") else store
        return self._store

    def _watch(self, folder: str) -> None:
        with suppress(Exception):  # the others have gone
            while (store := self._found()) is None or not store.check([KEY]):
                time.sleep(EVERY_SECONDS)
            tell_of_another_node(folder, store.get(KEY).decode(), str(world()))
