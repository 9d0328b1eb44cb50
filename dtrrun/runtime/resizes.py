"""`UntypedStorage.resize_` is no operator: FSDP empties and fills its storages with it.

The account follows, and room is made before a storage grows. Who resizes a storage decides about its memory:
it is not evicted any more. Needed as long as PyTorch has no hook for a storage's size.
"""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.ledger.locks import Locks
from dtrrun.ledger.record import Record
from dtrrun.runtime import storage as memory
from dtrrun.runtime.careful import Careful
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.guards import below
from dtrrun.runtime.patches import Function, Patches
from dtrrun.runtime.storage import rounded
from dtrrun.runtime.threads import joins


class Resizes:
    """Patches `resize_` of storages while installed."""

    def __init__(self, careful: Careful) -> None:
        self._careful = careful
        self._patches = Patches()

    def install(self) -> None:
        self._patches.wrap(torch.UntypedStorage, "resize_", self._resizing)

    def remove(self) -> None:
        self._patches.undo()

    def _resizing(self, original: Function) -> Function:
        careful, ledger = self._careful, self._careful.ledger

        def resize_(storage: Any, size: int) -> Any:
            joins()
            with careful.lock:
                ledger.drain()
                record = ledger.records.get(id(storage))
                if record is None or memory.device_type_of(storage) != ledger.device_type:
                    return original(storage, size)
                record = self._taken_over(record)
                self._make_room(record, rounded(size) - record.nbytes)
                try:
                    return original(storage, size)
                finally:  # also if an interrupt comes when it has been resized
                    ledger.resized(record, memory.size_of(storage))

        return resize_

    def _taken_over(self, record: Record) -> Record:
        """Bring it back, and leave it to the program; its record from now on."""
        careful = self._careful
        with Locks() as locks:
            careful.replay.lock([record], locks.taken)
        careful.ledger.written_outside(record, "resized by the program", exposes=True)
        return careful.ledger.records[record.key]

    def _make_room(self, record: Record, nbytes: int) -> None:
        if nbytes <= 0:
            return
        try:
            with (guard := below()), guard:
                self._careful.ledger.make_room(nbytes, "UntypedStorage.resize_")
        except BudgetError as error:
            self._careful.too_small(error)
            raise
