"""Which storages there are, which are in memory, and the bytes of it all."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dtrrun.ledger.foreign import Foreign
from dtrrun.ledger.record import Record, new_record

HELD_SHIFT = 3  # an eighth of the budget
SMALL_CONSTANT = 512  # bytes
SMALL_CONSTANTS = 256  # of them
LOOK_SHIFT = 4  # at the process's memory, when a sixteenth of the budget (of the peak) has been freed


class Block(weakref.ref):  # type: ignore[type-arg]
    """Accounts for memory that has no record: a recomputed storage that the program does not have, or a
    tensor without plain storage.

    pin: why the latter can't be evicted.
    """

    __slots__ = ("nbytes", "pin", "where")
    nbytes: int
    pin: str
    where: int  # of the latter: its address, once in `Storages.counted`


class Storages:
    """The accounts: records by storage, and what is resident, evicted or held by ourselves."""

    memory: Any
    """How a storage is emptied and refilled, and what it is: a module such as `runtime.storage`."""
    BudgetError: type[Exception]
    """Raised where a budget can't hold an operator; made of the operator, the bytes it needs, the budget, the
    least that would do, and the pinned bytes by reason."""

    def __init__(
        self,
        budget_bytes: int | None,
        policy: Any,
        *,
        device_type: str = "cpu",
        warn_only: bool = False,
    ) -> None:
        self.device_type = device_type
        self.replaying = 0  # replays under way
        self.policy = policy
        self.warn_only = warn_only
        self.records: dict[int, Record] = {}
        self.foreign = Foreign(self)
        self.blocks: dict[int, Block] = {}
        self.counted: dict[int, Block] = {}  # tensors without plain storage, by address
        self.held: dict[int, Record] = {}  # recomputed versions that the program does not have
        self._swept_evictions = self.held_bytes = 0
        # The program lets go of them at once (`torch.tensor(2.0)`): what they made could never be evicted.
        self.small_constants: deque[Any] = deque(maxlen=SMALL_CONSTANTS)
        self.dead: deque[Any] = deque()
        self.on_death = self.dead.append  # runs at any moment, in any thread: it only queues
        self.pressure = False  # whether memory ever ran short: until then the policy is told nothing
        self.set_budget(budget_bytes)
        self.clock = 0  # ns: the sum of the costs of all operators run
        self.age = 0  # operators seen
        self.resident_bytes = self.peak_bytes = self.evicted_bytes = self.step_peak_bytes = 0
        self.evictions = self.evicted_bytes_total = self.over_budget = 0
        self.evicted_by: dict[str, int] = {}
        self.fingerprints: Any = None  # set under verify
        self.reach = -1  # on a GPU: what tensors could take without any holes between them
        self.promised: dict[int, tuple[int, int]] = {}
        """To operators under way, by the id of their call: the thread, and bytes that are its own."""
        self.beside: dict[str, int] = {}  # bytes of the budget that are not tensors', by what they are
        self.rematerialize: Any = None  # set by the session: Replay.materialize
        self.heap: Any = None  # set by the session on the CPU
        self.met_device: Any = None  # set by the session: told the type of a device that is not ours
        self._freed_bytes = 0
        self.making_room_ns = 0

    @property
    def promised_bytes(self) -> int:
        """The room of operators under way, which another thread's may not take."""
        return sum([nbytes for _, nbytes in self.promised.values()])

    def set_budget(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.limit = (1 << 62) if budget_bytes is None else budget_bytes
        # Smaller storages are not worth a search, unless the budget asks for everything.
        self.least_bytes = min(1024, self.limit // 10_000)
        if self.pressure:
            for record in self.records.values():  # some were too small for the budget before
                if record.op is not None and record.resident and record.nbytes >= self.least_bytes:
                    self.policy.insert(record)

    def adopt(self, storage: Any, *, pin: str = "constant") -> Record:
        """Enter a storage that no recorded operator made: a constant."""
        record = new_record(storage, self.on_death, self.memory.size_of(storage), self.age, self.clock)
        record.pin = pin
        device_type = self.memory.device_type_of(storage)
        if device_type != self.device_type:
            # Another device's: neither counted nor replayed from (a copy from the host is a constant).
            record.nbytes, record.exposed, record.pin = 0, True, "other device"
            if self.met_device is not None and device_type != "meta":
                self.met_device(device_type)
        elif not self.memory.is_ours(storage):
            record.exposed, record.pin = True, "foreign memory"
            self.foreign.adopted(record, storage)
        elif pin == "constant" and 0 < record.nbytes <= SMALL_CONSTANT:
            self.small_constants.append(storage)
        if self.resident_bytes + record.nbytes > self.limit:
            with suppress(
                self.BudgetError
            ):  # the memory exists already: what can be done is to make up for it
                self.make_room(record.nbytes, "a tensor from outside")
        self.records[record.key] = record
        self.resident_bytes += record.nbytes  # at once: a call in between could be interrupted
        self.note_peak(self.resident_bytes)
        return record

    def made_last(self) -> Iterator[tuple[int, str, int]]:
        """For `policy.foresight`: age, maker and bytes of storages that operators made, the newest first."""
        for record in reversed(self.records.values()):
            if record.op is not None and not record.version:
                yield record.age, record.op.signature.operator.name, record.nbytes

    def grow(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        self.note_peak(self.resident_bytes)

    def resized(self, record: Record, nbytes: int) -> None:
        """A resident storage has other bytes now."""
        self.policy.discard(record)
        if nbytes > SMALL_CONSTANT >= record.nbytes:  # keep it alive no longer
            kept = [storage for storage in self.small_constants if storage is not record()]
            self.small_constants = deque(kept, self.small_constants.maxlen)
        self.resident_bytes += nbytes - record.nbytes
        record.nbytes = nbytes
        self.note_peak(self.resident_bytes)
        if self.pressure and record.op is not None and nbytes >= self.least_bytes:
            self.policy.insert(record)

    def note_peak(self, nbytes: int) -> None:
        if nbytes > self.step_peak_bytes:
            self.step_peak_bytes = nbytes
            if nbytes > self.peak_bytes:
                self.peak_bytes = nbytes

    def drain(self) -> None:
        """Account for the storages that died since the last call."""
        dead = self.dead
        before = self.resident_bytes
        record: Any = None
        try:
            while dead:
                record = dead[0]
                dead.popleft()
                if type(record) is Block:
                    place = id(record)
                    if place in self.blocks:  # no call until it is accounted for: none can be interrupted
                        del self.blocks[place]
                        self.resident_bytes -= record.nbytes
                    if record.pin and self.counted.get(record.where) is record:
                        del self.counted[record.where]
                    continue
                current: Any = self.records.get(record.key)
                if current is not record:
                    continue  # superseded by a later version, which has a callback of its own
                del self.records[record.key]
                if record.held is not None:  # it died, evicted, while a replay had it: what there is is ours
                    self.evicted_bytes -= record.nbytes
                elif record.resident:
                    self.resident_bytes -= record.nbytes
                    record.resident = False
                    if self.pressure and record.op is not None:
                        self.policy.discard(record)
                        if record.used:
                            self.policy.released(record)  # what depends on it may need it again
                else:
                    self.evicted_bytes -= record.nbytes
                    self.policy.forget(record)
                    if record.used:
                        self.policy.released(record)
        except BaseException:
            # An interrupt: once more, or the table keeps a name that the next storage may get.
            if record is not None:
                dead.appendleft(record)
            raise
        if self.heap is not None:
            self.freed(before - self.resident_bytes)

    def freed(self, nbytes: int) -> None:
        """Look now and then at what has become of the memory that was given back to the C library."""
        self._freed_bytes += nbytes
        limit = self.peak_bytes if self.budget_bytes is None else self.limit
        if self._freed_bytes > limit >> LOOK_SHIFT and (self.pressure or self.budget_bytes is None):
            self._freed_bytes = 0
            self.heap.check(self.resident_bytes, limit)

    def count(self, owner: Any, nbytes: int, where: int, pin: str) -> None:
        """Account for the memory at an address, which is no storage's, until its owner dies."""
        if where in self.counted:
            return
        block = Block(owner, self.on_death)
        block.nbytes, block.pin, block.where = nbytes, pin, where
        self.counted[where] = self.blocks[id(block)] = block
        self.resident_bytes += nbytes  # at once: a call in between could be interrupted
        self.note_peak(self.resident_bytes)

    def hold(self, record: Record, storage: Any) -> None:
        """Keep a recomputed storage for a version that the program does not have."""
        block = Block(storage, self.on_death)
        block.nbytes, block.pin, block.where = record.nbytes, "", 0
        place, key = id(block), id(record)
        # From here on no call, which could be interrupted, until all is said.
        self.blocks[place] = record.block = block
        self.held[key] = record
        self.held_bytes += record.nbytes
        self.resident_bytes += record.nbytes
        record.held = storage
        record.resident = True
        self.note_peak(self.resident_bytes)

    def drop(self, record: Record) -> None:
        """Let go of a recomputed storage."""
        place, key = id(record.block), id(record)
        # From here on no call, which could be interrupted, until all is said.
        if key in self.held:
            del self.held[key]
            self.held_bytes -= record.nbytes
        if place in self.blocks:
            del self.blocks[place]
            self.resident_bytes -= record.nbytes
        record.held = record.block = None
        record.resident = False

    def sweep(self) -> None:
        """Let go of recomputed storages that no recipe reads any more."""
        self._swept_evictions = self.evictions
        for place in reversed(list(self.held)):
            record = self.held[place]
            # References: the table, the variable, getrefcount's argument, and the policy's pool.
            if not record.locks and sys.getrefcount(record) <= 3 + (record.bound is not None):
                self.policy.discard(record)
                self.drop(record)

    def trim(self) -> None:
        """Keep what was recomputed beside the target only to a share of the budget, the latest first.

        All of it would be the paper's way (App. C.4); on an LSTM at 40 % of its peak it then crowded out what
        the program itself was going to use, and the step did not end. None of it recomputes more.
        """
        allowed = 0 if self.budget_bytes is None else self.limit >> HELD_SHIFT
        if self.held_bytes <= allowed:
            return
        idle = [record for record in self.held.values() if not record.locks]
        excess = sum(record.nbytes for record in idle) - allowed
        for record in idle:
            if excess <= 0:
                break
            excess -= record.nbytes
            self.drop(record)
            self.policy.released(record)

    def make_room(self, nbytes: int, operator: str) -> None:
        """Evict until `nbytes` more fit (see `Ledger`)."""
        raise NotImplementedError
