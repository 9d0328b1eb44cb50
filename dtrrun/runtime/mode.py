"""The dispatch mode: what happens around every operator of the program.

This is the hot path. A plain operator of one thread is handled here, without a lock and with as few Python
objects as a recipe needs; everything else is in `careful`, as is the way to bring inputs back and make room.
"""

from __future__ import annotations

import weakref
from time import perf_counter_ns as now_ns
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtrrun.ledger.recipes import CHAIN_LIMIT
from dtrrun.ledger.record import HOLE, Op, Record
from dtrrun.runtime import compiler, lists, storage
from dtrrun.runtime.ambient import DEFAULT_DTYPE
from dtrrun.runtime.arguments import KINDS, PLAIN, SEQUENCE, TENSOR, VALUE, flatten_into, is_leaf, kind_of
from dtrrun.runtime.careful import Careful
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.outcomes import recipe
from dtrrun.runtime.storage import storage_of
from dtrrun.runtime.tracebacks import hide

Tensor = torch.Tensor
FLOAT32 = torch.float32
NO_TENSORS = {type(None), bool, int, float, complex}
_NOTHING: dict[str, Any] = {}


class DTRMode(TorchDispatchMode):
    """Dynamic Tensor Rematerialization as a dispatch mode (paper, Sec. 2)."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch is to wrap the handler."""
        return not compiler.CAN_MARK

    def __init__(self, careful: Careful) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.careful = careful
        self.ledger = careful.ledger
        self.operators = careful.operators
        self.signatures = careful.signatures
        self.operators_ns = 0  # of the program's own operators
        self.bookkeeping_ns = 0  # of ours, but for replays and making room
        self.mask = storage.MASK  # by which the allocator rounds
        self.settings = careful.ambient.readers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self.dispatch(func, types, args, kwargs)
        except BaseException as error:
            hide(error)
            raise

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator of the program (see the head of this file)."""
        entered = now_ns()
        careful = self.careful
        operator = self.operators.get(func)
        if operator is None:
            operator = careful.learn(func)
        if not operator.simple or careful.always or (types and types != PLAIN):
            plain = not careful.always and (not types or types == PLAIN)
            if plain and operator.updates_lists and lists.update(self, operator, func, args, kwargs, entered):
                return None
            return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
        if operator.view:
            result = self._view(operator, func, args, kwargs, entered)
            if result is NotImplemented:
                return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
            return result
        ledger = self.ledger
        if ledger.dead:
            ledger.drain()
        # Take the arguments apart: records of the inputs, key of the signature, recipe.
        records = ledger.records
        clock = ledger.clock
        key: list[Any] = [func]
        template: list[Any] = []
        inputs: list[Record] = []
        geometries: list[Any] = []
        whole = True
        for arg in args:
            cls = type(arg)
            kind = KINDS.get(cls)
            if kind is None:
                kind = kind_of(cls)
            if kind == TENSOR:
                try:
                    record = records[id(storage_of(arg))]
                except (KeyError, NotImplementedError):
                    return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
                if record.exposed:
                    return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
                if not record.resident:
                    whole = False
                record.last_access = clock
                inputs.append(record)
                geometries.append((arg.size(), arg.stride(), arg.storage_offset(), arg.dtype))
                template.append(HOLE)
            elif kind == VALUE:
                template.append(arg)
                key.append(arg)
            elif kind == SEQUENCE:
                found: list[Tensor] = []
                template.append(flatten_into(arg, key, found))
                for item in found:
                    try:
                        record = records[id(storage_of(item))]
                    except (KeyError, NotImplementedError):
                        return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
                    if record.exposed:
                        return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
                    if not record.resident:
                        whole = False
                    record.last_access = clock
                    inputs.append(record)
                    geometries.append((item.size(), item.stride(), item.storage_offset(), item.dtype))
            else:
                template.append(arg)
        if kwargs:
            for name, arg in kwargs.items():
                kind = KINDS.get(type(arg))
                key.append(name)
                if kind == VALUE:
                    key.append(arg)
                elif kind is None or kind <= SEQUENCE:
                    return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
        state = self.settings[operator.family]()
        if state[DEFAULT_DTYPE] is not FLOAT32:
            key.append(state[DEFAULT_DTYPE])
        key += geometries
        signature = self.signatures.get(tuple(key))
        if signature is None:
            return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
        needed = ledger.resident_bytes + signature.output_bytes
        if not whole or needed > ledger.limit or (signature.workspace and ledger.pressure):
            entered += careful.make_ready(inputs, signature)
            clock = ledger.clock
        target = None
        if operator.mutates:
            target = inputs[0]
            if target.op is None:
                if target.secured_by is not None:
                    return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
            elif (
                target.age < ledger.step_age
                or target.version >= CHAIN_LIMIT
                or (args[0].requires_grad and is_leaf(args[0]))
            ):
                return careful.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
        started = now_ns()
        try:
            result = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
            ended = now_ns()
            cost = ended - started
            calls = signature.calls
            if calls < 8:
                if cost < signature.cost or not calls:
                    signature.cost = cost
                signature.calls = calls + 1
            ledger.clock = clock = clock + signature.cost
            ledger.age += 1
            self.operators_ns += cost
            if ledger.dead:
                ledger.drain()
            if target is not None:
                if target.op is not None:
                    op = recipe(func, template, kwargs, inputs, signature, state)
                    op.outputs = ((~0, weakref.ref(ledger.supersede(target, op, signature.cost))),)
                elif target.used:
                    ledger.supersede(target, None, 0)
        except BaseException as error:
            if target is not None and not careful.unbegun(operator, error):
                ledger.half_written(target)
            raise
        if target is not None:
            pass  # entered above
        elif type(result) is Tensor:
            try:
                stored = storage_of(result)
            except NotImplementedError:  # sparse or opaque
                careful.enter(result, func, operator, signature, template, kwargs, inputs, state)
                return result
            place = id(stored)
            if place not in records:
                # Twins of `recipe` and `new_record`, for speed.
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
                made = Record(stored, ledger.on_death)
                made.key = place
                made.nbytes = nbytes = (stored.nbytes() - 1 - self.mask) & self.mask
                made.age = ledger.age
                made.last_access = clock
                made.resident = True
                made.superseded = made.used = made.exposed = False
                made.op = op
                made.cost = signature.cost
                made.locks = made.version = 0
                made.pin = made.held = made.block = made.secured_by = None
                made.component = made.dependents = made.bound = made.neighbourhood = None
                records[place] = made  # whole: an interrupt can come before any line
                ledger.resident_bytes = resident = ledger.resident_bytes + nbytes
                if resident > ledger.step_peak_bytes:
                    ledger.note_peak(resident)
                if ledger.pressure and nbytes >= ledger.least_bytes:
                    ledger.policy.insert(made)
        elif type(result) not in NO_TENSORS:
            careful.enter(result, func, operator, signature, template, kwargs, inputs, state)
        if ledger.resident_bytes > ledger.limit:
            careful.shrink(operator, result)
        left = now_ns()
        self.bookkeeping_ns += started - entered + left - ended
        if left > careful.next_tick:
            careful.tick()
        return result

    def concerns(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator touches the session's device."""
        return True

    def _view(self, operator: Operator, func: Any, args: Any, kwargs: Any, entered: int) -> Any:
        """A view of a storage that is in memory: nothing to enter."""
        ledger = self.ledger
        if ledger.dead:
            ledger.drain()
        try:
            record = ledger.records[id(storage_of(args[0]))]
        except (KeyError, NotImplementedError, TypeError):
            return NotImplemented
        if not (record.resident or operator.untouching):
            return NotImplemented
        record.last_access = ledger.clock
        started = now_ns()
        result = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        ended = now_ns()
        ledger.age += 1
        self.operators_ns += ended - started
        self.bookkeeping_ns += started - entered
        return result


if compiler.CAN_MARK:
    compiler.keep_off(DTRMode.__torch_dispatch__)
