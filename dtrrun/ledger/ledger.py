"""The ledger: decides what is evicted to make room.

Invariants (design note, section 2): `resident_bytes` is what the program's and our own tensors hold; what is
evicted can be brought back with the same bits; the ledger holds no tensor of the program alive, except
constants that something evicted is to be recomputed from.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from time import perf_counter_ns as now_ns
from typing import Any

from dtrrun.ledger.locks import Locks
from dtrrun.ledger.record import Record
from dtrrun.ledger.writes import Writes

KEPT = 4  # times as much time a byte


class Ledger(Writes):
    """Storages by version, their recipes, and the room for them; knows nothing of dispatch."""

    def make_room(self, nbytes: int, operator: str) -> None:
        """Evict until `nbytes` more fit into the budget; raises BudgetError if that can't be."""
        self.drain()
        nbytes += self.promised_bytes
        if self.resident_bytes + nbytes <= self.limit:
            return
        started = now_ns()
        if not self.pressure:
            self._begin_pressure()
        while self.resident_bytes + nbytes > self.limit:
            if self.held and self.evictions - self._swept_evictions >= len(self.held) >> 4:
                self.sweep()
                self._swept_evictions += 1
                continue
            victim = self.policy.select(self.clock, self._evictable)
            if victim is None:
                if self.dead:
                    self.drain()
                    continue
                if self._collect_garbage():
                    continue
                self.making_room_ns += now_ns() - started
                if self.reach >= 0 and not (self.replaying and self.resident_bytes + nbytes > self.reach):
                    return  # the limit is an estimate: the allocator itself says whether there is room
                if self.warn_only:
                    self.over_budget += 1
                    return
                raise self._too_small(nbytes - self.promised_bytes, operator)
            self.evict(victim)
        self.making_room_ns += now_ns() - started

    def shrink(self, made: Sequence[Record], operator: str) -> None:
        """An operator made more than was foreseen: evict until the budget holds, but nothing of that."""
        locks = Locks()
        with locks:
            locks.take(made)
            self.make_room(0, operator)

    def _collect_garbage(self) -> bool:
        """Before giving up: tensors in reference cycles. At most once in a thousand operators."""
        if self.age < self._next_collection:
            return False
        self._next_collection = self.age + 1000
        before = self.resident_bytes
        gc.collect()
        self.drain()
        return self.resident_bytes < before

    _next_collection = 0

    def _begin_pressure(self) -> None:
        """Memory runs short for the first time: tell the policy of everything that there is."""
        self.pressure = True
        seen: set[int] = set()
        stack: list[Record] = []
        for record in self.records.values():
            if record.op is not None:
                stack.append(record)
                if record.resident and record.nbytes >= self.least_bytes:
                    self.policy.insert(record)
        while stack:
            for source in stack.pop().inputs:
                if source.op is not None and not source.resident and id(source) not in seen:
                    seen.add(id(source))
                    stack.append(source)
                    self.policy.released(source)

    def _evictable(self, record: Record) -> bool:
        if record.locks or not record.resident or record.op is None:
            return False
        if record.held is not None and self.warn_only and self.replaying:
            return False  # a budget that can't be kept must not make one replay exponential
        if record.held is None and record() is None:
            return False  # died this moment; `drain` accounts for it
        return self.secure(record)

    def evict(self, record: Record) -> None:
        """Free the memory of an evictable record (App. C.4)."""
        assert record.op is not None
        self.evictions += 1
        self.evicted_bytes_total += record.nbytes
        name = record.op.signature.operator.name
        self.evicted_by[name] = self.evicted_by.get(name, 0) + 1
        if record.held is not None:
            self.drop(record)
            self.policy.released(record)
        else:
            storage: Any = record()
            self._keep_inputs(record, storage)
            if self.fingerprints is not None:
                record.fingerprint = self.fingerprints.of(record)
            record.resident = False
            self.resident_bytes -= record.nbytes
            self.evicted_bytes += record.nbytes
            try:
                self.memory.empty(storage)
            except BaseException:  # an interrupt, before or after it
                self.memory.empty(storage)
                raise
            self.policy.evicted(record)
        if self.heap is not None:
            self.freed(record.nbytes)

    def _keep_inputs(self, record: Record, storage: Any) -> None:
        """Keep those inputs of an evicted storage that would be much dearer to have again than it is.

        The program may release them before it needs the storage: a DenseNet's feature maps, of which cheap
        concatenations are made; a gradient on its way back, from which the next one was computed. They stay
        evictable.
        """
        op = record.op
        assert op is not None
        kept = [
            content
            for source in op.inputs
            if source.op is not None
            and source.resident
            and source.held is None
            and self.policy.projected_cost(source) * record.nbytes > KEPT * record.cost * source.nbytes
            and (content := source()) is not None
        ]
        op.kept = tuple(kept)
        for reference in record.secured_by or ():
            node = reference()
            if node is not None and node.op is not None and node.op.kept:
                node.op.kept = tuple([other for other in node.op.kept if other is not storage])

    def restored(self, record: Record) -> None:
        """Account for an evicted storage that has its memory again."""
        record.resident = True
        self.evicted_bytes -= record.nbytes
        self.resident_bytes += record.nbytes
        self.note_peak(self.resident_bytes)
        if self.fingerprints is not None and record.fingerprint is not None:
            self.fingerprints.compare(record)

    def pinned_by_reason(self) -> dict[str, int]:
        """Bytes in memory that can't be evicted now, by reason, largest first."""
        held: dict[str, int] = {}
        for record in (*self.records.values(), *self.held.values()):
            if record.resident and (record.locks or record.op is None):
                reason = "in use by the operator" if record.locks else record.pin or "constant"
                held[reason] = held.get(reason, 0) + record.nbytes
        for block in self.counted.values():
            held[block.pin] = held.get(block.pin, 0) + block.nbytes
        return dict(sorted(held.items(), key=lambda item: -item[1]))

    def least_bytes_with(self, records: Sequence[Record]) -> int:
        """What these records take together with all that cannot be evicted, whoever has locked it now."""
        constants = (record for record in self.records.values() if record.resident and record.op is None)
        wanted = {id(record): record.nbytes for record in (*constants, *records)}
        blocks = sum(block.nbytes for block in self.counted.values())
        return sum(wanted.values()) + blocks + sum(self.beside.values())

    def _too_small(self, nbytes: int, operator: str) -> Exception:
        assert self.budget_bytes is not None
        beside = max(self.budget_bytes - self.limit, sum(self.beside.values()), 0)  # on a GPU
        promised = {"results of operators under way": self.promised_bytes} if self.promised_bytes else {}
        return self.BudgetError(
            operator,
            nbytes,
            self.budget_bytes,
            self.resident_bytes + self.promised_bytes + nbytes + beside,
            self.pinned_by_reason() | self.beside | promised,
        )

    def end_step(self) -> None:
        """An optimizer has stepped."""
        self.end_period()

    def restore_all(self) -> list[Record]:
        """Bring back everything that the program still has; returns what could not be brought back."""
        return [
            record
            for record in list(self.records.values())
            if record.alive and not record.resident and not self._restored(record)
        ]
