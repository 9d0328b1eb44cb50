"""Mutation: in-place operators, running statistics, and code outside that writes to a storage."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtrrun.ledger.record import HOLE, Record, Signature
from dtrrun.runtime.arguments import covers, is_leaf
from dtrrun.runtime.calls import Call, Calls
from dtrrun.runtime.storage import device_type_of, size_of


class Mutations(Calls):
    """What operators write to, and what a replay must not write to again."""

    def watch_new(self) -> Callable[[], None]:
        """Until what it returns is called: whatever is made is handed out to code that no operator shows."""
        before = list(self.ledger.records.values())
        known = set(map(id, before))
        limit, self.ledger.limit = self.ledger.limit, 1 << 62  # nothing of it may be evicted before

        def ended() -> None:
            self.ledger.limit = limit
            with self.lock:
                self.ledger.drain()
                for record in list(self.ledger.records.values()):
                    if id(record) not in known:
                        self.ledger.expose(record, "handed out")
            before.clear()  # until here, so that no new record got the id of an old one

        return ended

    def _prepare_mutation(self, call: Call) -> None:
        """Decide which mutations get a recipe; what the others destroy is rescued before."""
        written = list(call.written.values())
        targets = [call.records[holes[0]] for holes in written]

        def leaf(place: int) -> bool:
            tensor = call.tensors[written[place][0]]
            return tensor.requires_grad and is_leaf(tensor)

        call.recordable = self.ledger.prepare_writes(
            targets,
            call.recordable and not call.operator.reshapes_storage,
            leaf,
            lambda place: overwritten(call, targets[place], written[place]),
            call.changing,
        )

    def _statistics_of(self, call: Call) -> list[int]:
        """Holes of the running statistics, if this call does not read them (training)."""
        rule = call.operator.statistics
        if rule is None or rule.flag >= len(call.template) or not call.template[rule.flag]:
            return []
        return [
            sum(1 for arg in call.template[:position] if arg is HOLE)
            for position in rule.positions
            if call.template[position] is HOLE
        ]

    def _leave_out_statistics(self, call: Call) -> None:
        """A replay neither reads nor updates running statistics (design note "schemas that lie")."""
        holes = self._statistics_of(call)
        rule = call.operator.statistics
        if rule is None or not holes:
            return
        for hole in holes:
            if rule.updates and call.records[hole].used:
                self.ledger.supersede(call.records[hole], None, 0)
        call.template = [None if place in rule.positions else arg for place, arg in enumerate(call.template)]
        call.records = [record for hole, record in enumerate(call.records) if hole not in holes]
        call.signature = self._without(call.signature, set(holes))
        call.func = rule.replay or call.func

    @staticmethod
    def _without(signature: Signature, dropped: set[int]) -> Signature:
        """The signature of a replay that leaves out some tensors."""
        if signature.replayed_as is None:
            kept = tuple(g for hole, g in enumerate(signature.geometries) if hole not in dropped)
            other = Signature(signature.operator, kept)
            other.calls, other.output_bytes = signature.calls, signature.output_bytes
            signature.replayed_as = other
        signature.replayed_as.guessed = signature.guessed
        signature.replayed_as.cost = signature.cost
        signature.replayed_as.output_bytes = signature.output_bytes
        return signature.replayed_as

    def _resized(self, record: Record) -> None:
        """An `out=` or `resize_` may have grown the storage, also from nothing."""
        storage = record()
        if storage is None or device_type_of(storage) != self.ledger.device_type:
            return
        nbytes = size_of(storage)
        if nbytes != record.nbytes:
            self.ledger.resized(record, nbytes)


def overwritten(call: Call, record: Record, holes: list[int]) -> bool:
    """Whether a call writes all of a record's storage through one tensor, and does not read it."""
    return (
        call.operator.overwrites
        and len(holes) == 1
        and covers(call.tensors[holes[0]])
        and sum(1 for other in call.records if other is record) == 1
    )


def versions_of(call: Call) -> list[tuple[torch.Tensor, int]]:
    """The tensors that a call is going to write to, with autograd's count of the writes so far."""
    written = [call.tensors[hole] for holes in call.written.values() for hole in holes]
    # Tensors of inference mode have no such count.
    return [(tensor, tensor._version) for tensor in written if not tensor.is_inference()]


def note_mutation(before: list[tuple[torch.Tensor, int]]) -> None:
    """Count the writes that PyTorch has not counted; else a backward would not see that it lost a value."""
    torch.autograd.graph.increment_version(
        [tensor for tensor, version in before if tensor._version == version]
    )
