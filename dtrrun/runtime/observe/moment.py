"""What a session knew when it refused memory, for advice that is worked out only when somebody asks for it.

Taking it down costs half a microsecond for each storage. By the time somebody asks, storages have died, and
the backward pass or the optimizer's step that was under way has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Operation, Version
from dtrrun.runtime import storage
from dtrrun.runtime.observe.training_memory import as_in, phase


class Seen(NamedTuple):
    """A version as it was. Its recipe keeps what it reads, as the error's traceback keeps the tensors."""

    key: int
    nbytes: int
    age: int
    resident: bool
    locks: int
    used: bool
    pin: str | None
    operation: Operation | None
    device: int
    escaped: bool
    leaves: bool  # whether it may leave for the host, once no operator needs it


def _seen(one: Version, leaves: bool = False) -> Seen:
    facts = one.key, one.nbytes, one.age, one.resident, one.locks, one.used, one.pin, one.operation
    return Seen(*facts, one.device, one.escaped, leaves)


class Moment:
    """A ledger as it was. It has what advice, labels and hints read of a `Ledger`, and of a `History`.

    It is about the device that was in use. place: its name, without an index if there is one only.
    """

    def __init__(self, dtr: DTR, inputs: Sequence[Version]) -> None:
        ledger, history = dtr.ledger, dtr.history
        self.key_of, self.device_type, self.device = ledger.key_of, ledger.device_type, ledger.device
        several = ledger.devices > 1
        self.place = f"{self.device_type}:{storage.OURS[self.device]}" if several else self.device_type
        self.budget_bytes, self.limit = ledger.budget_bytes, ledger.limit
        self.former_step_age = history.former_step_age
        self.age, self.step_age, self.overhead = ledger.age, ledger.step_age, dict(ledger.overhead)
        self.constants_leave = ledger.constants_leave
        leaves = dtr.eviction.could_leave if ledger.constants_leave else lambda _: False
        here = [one for one in ledger.versions.values() if one.device == self.device]
        self.versions = {one.key: _seen(one, leaves(one)) for one in here}
        self.scratch = [_seen(one) for one in ledger.scratch if one.device == self.device]
        self.inputs = [_seen(one) for one in inputs]
        self._blocks = ledger.pinned_blocks()
        self._phase = phase()

    def pinned_blocks(self) -> dict[str, int]:
        return dict(self._blocks)

    def again(self) -> AbstractContextManager[None]:
        """Return a context in which this thread counts as being in the phase of training of that moment."""
        return as_in(self._phase)
