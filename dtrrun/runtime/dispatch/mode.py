"""The dispatch mode, which gets every operator of the program with `--native off`.

This is its fast path. Plain operators of one thread are handled here, without a lock and with as few Python
objects as a recipe needs. Everything else is in `slow_path`, including bringing inputs back and making room.
The fast path must always have the same effect as the slow path.
"""

from __future__ import annotations

from time import perf_counter_ns as now_ns
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtrrun.core.graph import HOLE, Operation, Version
from dtrrun.core.mutation import CHAIN_LIMIT
from dtrrun.runtime import contention, storage
from dtrrun.runtime.ambient import DEFAULT_DTYPE
from dtrrun.runtime.dispatch import lists
from dtrrun.runtime.dispatch.arguments import (
    KINDS,
    PLAIN,
    SEQUENCE,
    TENSOR,
    VALUE,
    flatten_into,
    is_leaf,
    kind_of,
)
from dtrrun.runtime.dispatch.python_mode import compiler
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.guards import is_tracing, untraced
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.storage import own_storage_of as storage_of  # Python's versions are told by their ids
from dtrrun.runtime.tracebacks import hide

Tensor = torch.Tensor
is_inference_mode_enabled = torch.is_inference_mode_enabled
FLOAT32 = torch.float32
NO_TENSORS = {type(None), bool, int, float, complex}
_NOTHING: dict[str, Any] = {}


class DTRMode(TorchDispatchMode):
    """Dynamic Tensor Rematerialization as a dispatch mode (paper, Sec. 2)."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether PyTorch should wrap the handler for Dynamo."""
        return not compiler.CAN_MARK

    fast_path: CodeType

    def __init__(self, slow_path: SlowPath) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slow_path = slow_path
        self.ledger = slow_path.ledger
        self.recipes = slow_path.dtr.recipes
        self.operators = slow_path.operators
        self.signatures = slow_path.signatures.by_key
        self.updates = slow_path.signatures.updates
        self.reasons = slow_path.reasons
        self.operators_ns = 0  # time in the program's own operators
        self.bookkeeping_ns = 0  # our time, without rematerializations and evictions
        self.mask = storage.MASK  # the allocator's rounding
        self.settings = slow_path.ambient.readers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if is_tracing():
                with untraced():
                    return self.dispatch(func, types, args, kwargs)
            return self.dispatch(func, types, args, kwargs)
        except BaseException as error:
            hide(error)
            raise

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator of the program (see the module docstring)."""
        entered = now_ns()
        slow_path = self.slow_path
        operator = self.operators.get(id(func))
        if operator is None:
            operator = slow_path.learn(func)
        if not operator.simple or self.reasons.any or (types and types != PLAIN):
            plain = not self.reasons.any and (not types or types == PLAIN)
            if plain and operator.updates_lists and lists.update(self, operator, func, args, kwargs, entered):
                return None
            # Outside inference mode there is nothing special about views that a schema does not declare.
            if not (plain and operator.views_unsaid) or is_inference_mode_enabled():
                return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
        if operator.view:
            result = self._view(operator, func, args, kwargs, entered)
            if result is NotImplemented:
                return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
            return result
        ledger = self.ledger
        if ledger.dead:
            ledger.collect_dead()
        # Flatten the arguments: the inputs' versions, the signature's key, the recipe.
        versions = ledger.versions
        clock = ledger.clock
        key: list[Any] = [operator]
        template: list[Any] = []
        inputs: list[Version] = []
        geometries: list[Any] = []
        whole = True
        for arg in args:
            cls = type(arg)
            kind = KINDS.get(cls)
            if kind is None:
                kind = kind_of(cls)
            if kind == TENSOR:
                try:
                    version = versions[id(storage_of(arg))]
                except (KeyError, NotImplementedError):
                    return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
                if version.escaped:
                    return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
                if not version.resident:
                    whole = False
                version.last_access = clock
                inputs.append(version)
                geometries.append((arg.size(), arg.stride(), arg.storage_offset(), arg.dtype))
                template.append(HOLE)
            elif kind == VALUE:
                template.append(arg)
                key.append(arg)
            elif kind == SEQUENCE:
                found: list[Tensor] = []
                key.append(len(arg))
                template.append(flatten_into(arg, key, found))
                for item in found:
                    try:
                        version = versions[id(storage_of(item))]
                    except (KeyError, NotImplementedError):
                        return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
                    if version.escaped:
                        return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
                    if not version.resident:
                        whole = False
                    version.last_access = clock
                    inputs.append(version)
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
                    return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
        state = self.settings[operator.family]()
        if state[DEFAULT_DTYPE] is not FLOAT32:
            key.append(state[DEFAULT_DTYPE])
        key += geometries
        signature = self.signatures.get(tuple(key))
        if signature is None:
            return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
        needed = ledger.resident_bytes + signature.output_bytes
        if not whole or needed > ledger.limit or (signature.workspace and ledger.pressure):
            entered += slow_path.make_ready(inputs, signature)
            clock = ledger.clock
        target = None
        if operator.mutates:
            target = inputs[0]
            if target.operation is None:
                if target.needed_by is not None or slow_path.dtr.copies.wants(target):
                    return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
            elif (
                target.age < ledger.step_age
                or target.mutations >= CHAIN_LIMIT
                or (args[0].requires_grad and is_leaf(args[0]))
            ):
                return slow_path.run(self, operator, func, types, args, kwargs or _NOTHING, entered)
        calls = signature.calls
        before = contention.usage() if calls < 8 else None
        started = now_ns()
        try:
            result = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
            ended = now_ns()
            cost = ended - started
            if calls < 8:
                own = contention.own_ns(cost, before)
                if own < signature.cost or not calls:
                    signature.cost = own
                signature.calls = calls + 1
            ledger.clock = clock = clock + signature.cost
            ledger.age += 1
            self.operators_ns += cost
            if ledger.dead:
                ledger.collect_dead()
            if target is not None:
                if target.operation is not None:
                    recorded = func, template, kwargs, None, state, ()
                    operation = ledger.graph.new_operation(recorded, signature, inputs, inputs)
                    for version in inputs:
                        version.used = True
                    made = self.recipes.supersede(target, operation, signature.cost)
                    operation.outputs = ~0
                elif target.used:
                    self.recipes.supersede(target, None, 0)
        except BaseException as error:
            if target is not None and not slow_path.unbegun(operator, error):
                self.recipes.half_written(target)
            raise
        if target is not None:
            pass  # entered above
        elif type(result) is Tensor:
            try:
                stored = storage_of(result)
            except NotImplementedError:  # sparse or opaque
                slow_path.enter(result, func, operator, signature, template, kwargs, inputs, state)
                return result
            place = id(stored)
            if place not in versions:
                # Copies of `new_operation` and `new_version`, inlined for speed.
                operation = Operation()
                operation.recorded = func, template, kwargs, None, state, ()
                operation.signature = signature
                operation.tensors = operation.inputs = inputs
                operation.outputs = operation.constants = None
                operation.kept_inputs = ()
                operation.secured = False
                for version in inputs:
                    version.used = True
                made = Version(stored, ledger.on_death)
                made.key = place
                made.nbytes = nbytes = (stored.nbytes() - 1 - self.mask) & self.mask
                made.age = ledger.age
                made.last_access = clock
                made.resident = True
                made.superseded = made.used = made.escaped = False
                made.operation = operation
                made.cost = signature.cost
                made.locks = made.mutations = 0
                made.pin = made.scratch = made.copy = made.block = made.needed_by = None
                made.component = made.dependents = made.bound = made.neighbourhood = None
                versions[place] = made  # complete now: an interrupt can come before any line
                ledger.resident_bytes = resident = ledger.resident_bytes + nbytes
                if resident > ledger.step_peak_bytes:
                    ledger.note_peak(resident)
                if ledger.pressure and nbytes >= ledger.least_bytes:
                    ledger.policy.insert(made)
        elif type(result) not in NO_TENSORS:
            slow_path.enter(result, func, operator, signature, template, kwargs, inputs, state)
        if ledger.resident_bytes > ledger.limit:
            slow_path.shrink(operator, result)
        left = now_ns()
        self.bookkeeping_ns += started - entered + left - ended
        if left > slow_path.next_tick:
            slow_path.tick()
        return result

    @staticmethod
    def call(func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of the program."""
        return func(*args, **kwargs)

    def concerns(self, args: Any, kwargs: Any) -> bool:
        """Return whether an operator uses the session's device."""
        return True

    def _view(self, operator: Operator, func: Any, args: Any, kwargs: Any, entered: int) -> Any:
        """A view of a resident storage: nothing to enter."""
        ledger = self.ledger
        if ledger.dead:
            ledger.collect_dead()
        try:
            version = ledger.versions[id(storage_of(args[0]))]
        except (KeyError, NotImplementedError, TypeError):
            return NotImplemented
        if not (version.resident or operator.untouching):
            return NotImplemented
        version.last_access = ledger.clock
        started = now_ns()
        result = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        ended = now_ns()
        ledger.age += 1
        self.operators_ns += ended - started
        self.bookkeeping_ns += started - entered
        return result


DTRMode.fast_path = DTRMode.dispatch.__code__

if compiler.CAN_MARK:
    compiler.keep_off(DTRMode.__torch_dispatch__)
