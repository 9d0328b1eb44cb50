"""What an operator leaves behind: new storages and versions, with the recipe that made them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dtrrun.ledger.record import Blank, Op, Record, Signature, inputs_of, new_record
from dtrrun.runtime import storage as memory
from dtrrun.runtime.ambient import State
from dtrrun.runtime.arguments import outputs_of
from dtrrun.runtime.calls import Call
from dtrrun.runtime.cost_model import modelled_ns
from dtrrun.runtime.mutation import Mutations, overwritten
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.passing import until_return
from dtrrun.runtime.storage import device_type_of, size_of, storage_of


class Outcomes(Mutations):
    """Enters results into the ledger."""

    def _finish(
        self, call: Call, args: Any, kwargs: dict[str, Any], result: Any, cost: int, recipe_rng: Any
    ) -> None:
        ledger = self.ledger
        signature = call.signature
        if self.device is not None:
            self.device.price(call, args, kwargs, result)
        else:
            self._price(call, args, kwargs, result, cost)
        ledger.age += 1
        if not call.operator.view:  # a view comes back with its storage
            ledger.clock += signature.cost
        if ledger.dead:
            ledger.drain()
        self._unlock(call)
        self._leave_out_statistics(call)
        op = self._recipe(call, recipe_rng) if call.recordable else None
        outputs: list[tuple[int, Any]] = []
        for holes in call.written.values():
            record = call.records[holes[0]]
            if op is not None:
                record = ledger.supersede(record, op, signature.cost)
                outputs.append((~holes[0], weakref.ref(record)))
            elif record.used:
                record = ledger.supersede(record, None, 0)
            if not call.operator.foreach:  # those never resize, and have thousands
                self._resized(record)
        if not call.operator.view or call.operator.reshapes_storage:
            self._enter_outputs(call, op, result, outputs)
            if call.signature is not signature:  # that of a replay, which leaves out statistics
                signature.output_bytes, signature.guessed = call.signature.output_bytes, False
        if op is not None:
            simple = len(outputs) == 1 and outputs[0][0] == 0 and not call.written
            op.outputs = None if simple else tuple(outputs)
        if self.observers and not call.operator.view:
            for observer in self.observers:
                observer(call.operator.name, signature.cost, call.records)
        if ledger.resident_bytes > ledger.limit:
            self.shrink(call.operator, result)
        if self.device is not None:
            self.device.finished(call, signature, result)

    def _price(self, call: Call, args: Any, kwargs: dict[str, Any], result: Any, cost: int) -> None:
        signature = call.signature
        if self.modelled and not signature.calls:
            nbytes = sum(record.nbytes for record in call.records) + signature.output_bytes
            signature.cost = modelled_ns(call.func, args, kwargs, result, nbytes)
            signature.calls = Signature.SETTLED
        if signature.calls < Signature.SETTLED:
            if cost < signature.cost or not signature.calls:
                signature.cost = cost
            signature.calls += 1

    def shrink(self, operator: Operator, result: Any) -> None:
        """The operator allocated more than was foreseen: make up for it at once."""
        if operator.view or (operator.mutates and not operator.grows):
            return
        made = [record for tensor in outputs_of(result, []) if (record := self.record_of(tensor)) is not None]
        self.ledger.shrink(made, operator.name)

    def _failed(self, call: Call) -> None:
        """The operator raised: the user sees its own error."""
        self._unlock(call)
        for holes in call.written.values():
            self.ledger.half_written(call.records[holes[0]])
            if not call.operator.foreach:
                self._resized(self.ledger.records[call.records[holes[0]].key])  # it may have been resized
        if call.operator.statistics is not None and call.operator.statistics.updates:
            for hole in self._statistics_of(call):
                self.ledger.half_written(call.records[hole])

    def _recipe(self, call: Call, recipe_rng: Any) -> Op:
        op = Op()
        op.func, op.args, op.kwargs = call.func, call.template, call.kwargs or None
        op.rng, op.signature = recipe_rng, call.signature
        op.held, op.kept, op.secured, op.outputs = None, (), False, None
        op.state, op.autocast = call.state, call.autocast
        tensors: list[Any] = []
        for record in call.records:
            holes = call.written.get(id(record))
            if holes and overwritten(call, record, holes):
                storage = record()
                assert storage is not None
                tensors.append(Blank(storage.nbytes(), storage.device))
            else:
                record.used = True
                tensors.append(record)
        op.tensors, op.inputs = tensors, inputs_of(tensors)
        return op

    def _enter_outputs(self, call: Call, op: Op | None, result: Any, outputs: list[tuple[int, Any]]) -> None:
        ledger = self.ledger
        total = 0
        for where, tensor in enumerate(outputs_of(result, [])):
            try:
                storage = storage_of(tensor)
            except (NotImplementedError, RuntimeError):
                for record in call.records:
                    ledger.expose(record, "shared with a tensor without plain storage")
                total -= ledger.resident_bytes
                self.count(tensor)
                total += ledger.resident_bytes
                continue
            if call.operator.takes_storage:  # the program has the storage itself, and may write to it
                given = self.record_of(tensor)
                if given is not None and until_return() is not None:
                    given.exposed, given.pin = False, "loaded or copied"  # nobody else will have it
                    self._resized(given)
                elif given is not None and not ledger.foreign.undecided(given):
                    ledger.expose(given, "handed out")
                    self._resized(given)
                continue
            if id(storage) in ledger.records:
                continue
            odd = is_odd(tensor, call.operator)
            unseen = where == call.operator.read_unseen
            if op is None or odd or unseen:
                pin = "read unseen" if unseen else "not replayable"
                if call.operator.uninitialised:
                    pin = "uninitialised"
                record = ledger.adopt(storage, pin=pin)
                record.exposed = record.exposed or odd
                total += record.nbytes
                continue
            if device_type_of(storage) != ledger.device_type:
                ledger.adopt(storage)
                continue
            if call.operator.foreign and not memory.is_ours(storage):  # it may wrap an array, for example
                total += ledger.adopt(storage).nbytes
                continue
            record = self._entered(storage, op)
            total += record.nbytes
            outputs.append((where, weakref.ref(record)))
            if ledger.fingerprints is not None:
                ledger.fingerprints.note(record, tensor)
                opaque = [source for source in call.records if source.nbytes and not source.extent]
                if where == call.operator.opaque_output or (opaque and not call.operator.reads_opaque):
                    record.extent = 0
        self._learn(call.operator, call.signature, total)

    def _learn(self, operator: Operator, signature: Signature, total: int) -> None:
        """Expect of the next call what this one has made; but where that varies, the most.

        On a GPU what is measured says more.
        """
        lower = (signature.guessed and self.device is None) or operator.opaque_output >= 0
        signature.guessed = False
        if total > signature.output_bytes or (lower and not (operator.dynamic or operator.grows)):
            signature.output_bytes = total

    def enter(
        self,
        result: Any,
        func: Any,
        operator: Operator,
        signature: Signature,
        template: list[Any],
        kwargs: dict[str, Any],
        inputs: list[Record],
        state: State,
    ) -> None:
        """Outputs of the short cut that are not one plain tensor."""
        if type(result) is tuple and self.ledger.fingerprints is None and not operator.takes_storage:
            try:
                storages = [storage_of(tensor) for tensor in result if tensor is not None]
            except (NotImplementedError, RuntimeError, TypeError):  # sparse, opaque, a number or a list
                pass
            else:
                self._enter_several(storages, recipe(func, template, kwargs, inputs, signature, state))
                return
        call = Call()
        call.func, call.operator, call.signature = func, operator, signature
        call.template, call.kwargs, call.records = template, kwargs, inputs
        call.written, call.opaque = {}, False
        call.state, call.autocast = state, ()
        with self.lock:
            if self.ledger.dead:
                self.ledger.drain()
            op = self._recipe(call, None)
            outputs: list[tuple[int, Any]] = []
            self._enter_outputs(call, op, result, outputs)
            op.outputs = tuple(outputs)

    def _enter_several(self, storages: list[torch.UntypedStorage], op: Op) -> None:
        """As `_enter_outputs`, without what the short cut's operators cannot have."""
        records, signature = self.ledger.records, op.signature
        outputs = []
        total = 0
        for where, storage in enumerate(storages):
            if id(storage) not in records:
                record = self._entered(storage, op)
                total += record.nbytes
                outputs.append((where, weakref.ref(record)))
        op.outputs = tuple(outputs)
        self._learn(signature.operator, signature, total)

    def _entered(self, storage: torch.UntypedStorage, op: Op) -> Record:
        """The record of a new storage that `op` has made."""
        ledger = self.ledger
        nbytes = size_of(storage)
        record = new_record(storage, ledger.on_death, nbytes, ledger.age, ledger.clock)
        record.op, record.cost = op, op.signature.cost
        ledger.records[record.key] = record
        ledger.resident_bytes += nbytes  # at once: a call in between could be interrupted
        ledger.note_peak(ledger.resident_bytes)
        if ledger.pressure and nbytes >= ledger.least_bytes:
            ledger.policy.insert(record)
        return record


def recipe(
    func: Any, template: list[Any], kwargs: Any, inputs: list[Record], signature: Signature, state: State
) -> Op:
    """Of an operator of the short cut; its outputs are yet to be entered."""
    op = Op()
    op.func = func
    op.args = template
    op.kwargs = kwargs
    op.rng = op.outputs = op.held = None
    op.kept = ()
    op.secured = False
    op.state = state
    op.autocast = ()
    op.signature = signature
    op.tensors = op.inputs = inputs
    for record in inputs:
        record.used = True
    return op


def is_odd(tensor: torch.Tensor, operator: Operator) -> bool:
    """Whether a result is more than a geometry over a storage, or less: neither evicted nor replayed from."""
    odd: bool = tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor()
    return odd or operator.keeps_state
