"""Deallocation by banishing: a storage that the program releases is evicted permanently (App. C.4, C.5).

It must have no evicted dependents, since they would need it. Its resident dependents could never be
recomputed without it, so they are pinned until they are banished themselves. If it has an evicted dependent,
banishing is tried again when one is rematerialized or banished; until then it is an ordinary storage and may
be evicted. Constants can be banished, too.

A view of a resident storage may be undefined. It counts as an evicted dependent of what its operator reads.
"""

from __future__ import annotations

from typing import Any

from .nodes import Op, Storage, Tensor
from .replay import Replay


class BanishingReplay(Replay):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.banished: set[Storage] = set()
        self._waiting: set[Storage] = set()
        """Released storages on which something evicted still depends."""
        self._readers: dict[Storage, list[Tensor]] = {}
        """deps^T(S), by tensor: what is computed from S."""

    def _enter(self, output: Tensor, op: Op) -> None:
        super()._enter(output, op)
        for source in {one.storage for one in op.inputs}:
            if source is not output.storage:
                self._readers.setdefault(source, []).append(output)

    def released(self, storage: Storage) -> None:
        storage.released = True
        self.policy.cost_changed(storage)  # it may stay in the pool with another score
        self._waiting.add(storage)
        self._try_to_banish([storage])

    def _unlock(self, inputs: list[Tensor]) -> None:
        super()._unlock(inputs)
        if self._waiting:  # what was computed from them may have been rematerialized
            self._try_to_banish([one.storage for one in inputs])

    def _try_to_banish(self, pending: list[Storage]) -> None:
        while pending:
            storage = pending.pop()
            if storage in self._waiting and all(one.defined for one in self._readers.get(storage, ())):
                self._waiting.remove(storage)
                # These may have one evicted dependent less.
                pending += [one.storage for tensor in storage.tensors for one in tensor.operator.inputs]
                self._banish(storage)

    def _banish(self, storage: Storage) -> None:
        self.banished.add(storage)
        if storage.resident:
            storage.resident = False
            self.evictions += 1
            self.memory -= storage.nbytes
            self.policy.discard(storage)
            if self._observer is not None:
                self._observer("evict", storage)
        else:
            self.policy.forget(storage)
        for tensor in storage.tensors:
            tensor.defined = True  # no longer needed; a sibling's replay frees it at once
        for reader in self._readers.pop(storage, ()):
            if reader.storage not in self.banished:
                self._pin(reader.storage)

    def _pin(self, storage: Storage) -> None:
        if not storage.pinned:
            storage.pinned = storage.constant = True
            storage.locks += 1
            self.policy.discard(storage)


class IgnoringReplay(Replay):
    """Ignores the program's deallocations."""

    def released(self, storage: Storage) -> None:
        pass
