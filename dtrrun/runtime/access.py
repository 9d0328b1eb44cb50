"""Access to a tensor's memory that is no operator: locked, pinned, or handed out to other code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from dtrrun.ledger.locks import Locks
from dtrrun.ledger.record import Record
from dtrrun.runtime.careful import Careful
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.storage import storage_of
from dtrrun.runtime.threads import joins

unseen = torch._C.DisableTorchFunction
"""Context: what we ask of a tensor is no business of the program's function modes and subclasses."""

Reach = Callable[[torch.Tensor, bool, bool], Callable[[], None]]
"""reach(tensor, writes, exposes) makes the memory safe to touch; returns what ends that.

What is exposed without being written to stays in memory, and is recomputed from."""


class Access:
    """What escapes, custom functions and the program itself ask for."""

    def __init__(self, careful: Careful) -> None:
        self._careful = careful

    def _record(self, tensor: torch.Tensor) -> Record | None:
        if tensor.device.type != self._careful.ledger.device_type:
            return None
        return self._careful.record_of(tensor)

    def _join(self, tensors: list[torch.Tensor]) -> None:
        ours = self._careful.ledger.device_type
        if any(tensor.device.type == ours for tensor in tensors):
            joins()

    def pin(self, tensor: torch.Tensor, why: str) -> None:
        """Keep a tensor's storage in memory from now on. Raises BudgetError."""
        with unseen():
            self._pin(tensor, why)

    def _pin(self, tensor: torch.Tensor, why: str) -> None:
        self._join([tensor])
        with self._careful.lock, self._locked([tensor]) as locks:
            for record in locks.taken:
                self._careful.ledger.pin(record, why)

    def lock(self, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """Keep storages in memory until what it returns is called. Raises BudgetError."""
        with unseen():
            self._join(tensors)
            with self._careful.lock:
                return self._locked(tensors)

    def _locked(self, tensors: list[torch.Tensor]) -> Locks:
        """On the records of tensors, which are in memory."""
        locks = Locks()
        while True:
            self._careful.ledger.drain()  # a new storage may have the identity of one that died
            records = [record for tensor in tensors if (record := self._record(tensor)) is not None]
            try:
                self._careful.replay.lock(records, locks.taken)
                return locks
            except BudgetError as error:
                if not self._careful.others_end():
                    self._careful.too_small(error)
                    raise

    def hold(self, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """As `lock`; but what the ledger has not met is in memory, and is not entered for being looked at."""
        known = []
        for tensor in tensors:
            with unseen(), suppress(NotImplementedError, RuntimeError):  # sparse, or opaque
                if id(storage_of(tensor)) in self._careful.ledger.records:
                    known.append(tensor)
        return self.lock(known)

    def reach(self, tensor: torch.Tensor, writes: bool, exposes: bool) -> Callable[[], None]:
        """An escape is about to touch the memory of `tensor`; returns what ends that."""
        unlock = self.lock([tensor])
        if writes or exposes:
            try:
                with unseen():
                    if writes:
                        self._hand_out(tensor, exposes)
                    else:
                        self._keep(tensor)
            except BaseException:
                unlock()
                raise
        return unlock

    def _keep(self, tensor: torch.Tensor) -> None:
        with self._careful.lock:
            record = self._record(tensor)
            if record is not None and record.op is not None:
                self._careful.ledger.pin(record, "handed out to be read")

    def _hand_out(self, tensor: torch.Tensor, exposes: bool) -> None:
        with self._careful.lock:
            record = self._record(tensor)
            if record is not None:
                why = "handed out" if exposes else "written outside"
                self._careful.ledger.written_outside(record, why, exposes=exposes)
