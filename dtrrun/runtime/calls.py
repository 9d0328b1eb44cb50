"""One operator call, taken apart: which storages it touches, which of them it writes to, its signature."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from dtrrun.ledger.locks import unlock
from dtrrun.ledger.record import Record, Signature
from dtrrun.runtime import shapes
from dtrrun.runtime.ambient import DEFAULT_DTYPE, State
from dtrrun.runtime.arguments import flatten_into, geometry_of, is_leaf, parts_of
from dtrrun.runtime.costs import Costs, identity
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.guards import Autocast, as_without_mode, below, inside_another_mode, program_autocast
from dtrrun.runtime.ledger import Ledger
from dtrrun.runtime.lists import key_of
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.replay import Replay
from dtrrun.runtime.storage import place_of, rounded, storage_of

UNPLAIN = "no plain storage"
_onednn: Any = torch.ops.mkldnn
CAN_ASK_ONEDNN = hasattr(_onednn, "data_ptr") and hasattr(_onednn, "_nbytes")
PATIENCE_SECONDS = 1.0  # with operators of other threads, which may wait for one another
SIGNATURES_LIMIT = 50_000  # programs whose shapes never repeat: start afresh rather than grow forever


class Call:
    """One operator call while it is under way."""

    __slots__ = (
        "autocast",
        "changing",
        "complex",
        "func",
        "generators",
        "kwargs",
        "locked",
        "needed",
        "opaque",
        "operator",
        "recordable",
        "records",
        "signature",
        "state",
        "template",
        "tensors",
        "unplain",
        "written",
    )

    func: Any
    operator: Operator
    template: list[Any]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    records: list[Record]
    locked: list[Record]
    needed: int  # on a GPU: bytes that it took at its peak, -1: not measured
    signature: Signature
    unplain: int  # bytes of its inputs that are no plain storage's
    changing: list[Record]  # constants that it is about to write to: until then nothing may rely on them
    written: dict[int, list[int]]  # id of a mutated record: the holes that it is written through
    opaque: bool
    complex: bool  # a tensor may have, or its kernel may give one, a conjugate or negative bit
    recordable: bool
    generators: list[torch.Generator]  # that it was given
    state: State
    autocast: Autocast  # of the operators that its kernel calls


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what it is a view of, is a parameter: what lives on and is not refilled."""
    base = tensor._base
    return any(
        isinstance(one, torch.nn.Parameter) or (one.requires_grad and is_leaf(one))
        for one in ((tensor,) if base is None else (tensor, base))
    )


class Calls:
    """Takes calls apart; locks and brings back what they read."""

    device: Any = None  # that of the session, if it is a GPU
    under_modes = False  # of the program's, entered before the session: results may be anything
    capturing = False  # a CUDA graph: nothing is evicted or run again
    asks_sizes = False  # of results before the first call, also where there is no budget
    costs: Costs = {}  # noqa: RUF012 - known before; replaced, never written to

    def __init__(
        self,
        ledger: Ledger,
        replay: Replay,
        tick: Callable[[], None],
        met_leaf: Callable[[torch.Tensor], None],
        too_small: Callable[[BudgetError], None],
        *,
        modelled: bool = False,
    ) -> None:
        self.modelled = modelled  # costs are computed, not measured
        self.ledger = ledger
        self.ambient = replay.ambient
        self.replay = replay
        self.operators: dict[Any, Operator] = {}
        self.signatures: dict[Any, Signature] = {}
        self.updates: dict[Any, Signature] = {}  # of operators that update lists, by `lists.key_of`
        self._reasons: set[str] = set()
        self.always = False  # the short cut does not apply: see `take_all`
        self.observers: tuple[Callable[[str, int, list[Record]], None], ...] = ()
        """Told of each operator that comes here, but for views: its name, cost in ns and inputs."""
        self.checks_modes = False  # an operator has run whose gradient formula asks for modes
        self.lock = threading.RLock()
        self._ended = threading.Condition(self.lock)
        self.next_tick = 0
        self.tick = tick
        self._met_leaf = met_leaf
        self.too_small = too_small

    def take_all(self, why: str) -> None:
        """From now on every operator comes here."""
        self._reasons.add(why)
        self.always = True

    def leave(self, why: str) -> None:
        """No longer, as far as that reason goes."""
        self._reasons.discard(why)
        self.always = bool(self._reasons)

    def tell(self, observer: Callable[[str, int, list[Record]], None]) -> None:
        """Add one of the observers; nothing if it is among them."""
        self.tell_no_more(observer)
        self.observers += (observer,)

    def tell_no_more(self, observer: Callable[[str, int, list[Record]], None]) -> None:
        self.observers = tuple(one for one in self.observers if one != observer)

    def forget_signatures(self) -> None:
        self.signatures.clear()
        self.updates.clear()

    def measure_again(self) -> None:
        """Time the next calls of each operator as its first ones were: the first step's have fresh pages."""
        if self.device is not None or self.modelled:
            return
        for key, signature in self.signatures.items():
            if signature.calls and not (self.costs and identity(key) in self.costs):
                signature.calls = 1

    def record_of(self, tensor: torch.Tensor) -> Record | None:
        """The record of a tensor's storage, entered as a constant if it is new; None if it has no storage."""
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):
            self.count(tensor)
            return None
        if tensor.is_nested or tensor.is_quantized:  # more than a geometry over a storage
            return None
        record = self.ledger.records.get(id(storage))
        if record is None:
            record = self.ledger.adopt(storage)
            if tensor.is_neg():
                self.take_all("lazy bits")  # negative views of it may be older than the session
            if tensor.requires_grad and is_leaf(tensor):
                record.pin = "parameter"
                self._met_leaf(tensor)
        return record

    def count(self, tensor: torch.Tensor) -> int:
        """Account for what a tensor without plain storage takes: that stays as long as the tensor does.

        Returns the bytes.
        """
        if tensor.device.type != self.ledger.device_type:
            return 0
        nbytes = 0
        if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
            if CAN_ASK_ONEDNN:
                with below():
                    where, nbytes = _onednn.data_ptr(tensor), rounded(_onednn._nbytes(tensor))
                self.ledger.count(tensor, nbytes, where, UNPLAIN)
            return nbytes
        for part in parts_of(tensor):
            storage = storage_of(part)
            record = self.ledger.records.get(id(storage))
            if record is None:
                record = self.ledger.adopt(storage, pin=UNPLAIN)
                record.exposed = True
            nbytes += record.nbytes
        return nbytes

    def _prepare(self, operator: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Call:
        ledger = self.ledger
        if ledger.dead:
            ledger.drain()
        call = Call()
        call.func, call.operator = func, operator
        key: list[Any] = [func]
        tensors: list[torch.Tensor] = []
        holes: list[int] = []
        call.template = []
        for arg in args:
            holes.append(len(tensors))
            call.template.append(flatten_into(arg, key, tensors))
        named: dict[str, int] = {}
        call.kwargs = {}
        for name, arg in kwargs.items():
            named[name] = len(tensors)
            key.append(name)
            call.kwargs[name] = flatten_into(arg, key, tensors)
        elsewhere = self._elsewhere(kwargs.get("device"), tensors)
        if elsewhere:
            key.append(elsewhere)  # a key that the short cut does not look for: it takes results to be here
        if operator.sized_by_numbers:
            key += [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (float, complex))]
        call.generators = operator.generators_of(args, kwargs)
        call.state = self.ambient.readers[operator.family]()
        if call.state[DEFAULT_DTYPE] is not torch.float32:
            key.append(call.state[DEFAULT_DTYPE])  # results without a dtype have this one
        call.autocast = program_autocast(operator) if operator.calls_others else ()
        holes.append(len(tensors))
        call.tensors = tensors
        call.opaque, call.complex = operator.shares_memory, False
        call.unplain = 0
        call.records, call.locked = [], []
        geometries: list[Any] = []
        for tensor in tensors:
            record = self.record_of(tensor)
            if record is None:
                call.opaque = True
                call.unplain += self.count(tensor)
                continue
            if record.exposed and not operator.view:
                record = ledger.foreign.read(
                    record,
                    is_parameter=is_parameter(tensor),
                    evicts=self.asks_sizes or ledger.budget_bytes is not None,
                )
            call.records.append(record)
            if record.pin is None and tensor.requires_grad and is_leaf(tensor):
                record.pin = "parameter"
                self._met_leaf(tensor)
            geometries.append(geometry_of(tensor))
            call.complex = call.complex or tensor.is_complex()
        key.extend(geometries)
        same: tuple[int, ...] = ()
        if operator.compares_tensors:
            same = tuple(
                next(place for place, other in enumerate(tensors) if other is one) for one in tensors
            )
            key.append(same)
        if call.complex:
            key.append("complex")  # not as the short cut asks for it: these calls must come to us
        if operator.opaque_output >= 0:
            key.append(torch.is_grad_enabled())  # with gradients off there is no workspace
        call.recordable = (
            operator.replayable
            and not operator.uninitialised
            and not elsewhere
            and not self.under_modes
            and not call.opaque
            and not any(record.exposed and not ledger.foreign.trusts(record) for record in call.records)
        )
        if call.complex and call.recordable:
            call.recordable = not inside_another_mode()  # a replay resolves lazy bits, its handler did not
        call.written = {}
        call.changing = []
        if operator.collective:
            for hole, record in enumerate(call.records):
                call.written.setdefault(id(record), []).append(hole)
        elif operator.mutates and not call.opaque:
            ends = [*holes[1:], *named.values(), len(tensors)]
            for place in operator.mutates:
                if isinstance(place, int):
                    if place >= len(args):
                        continue
                    first, last = holes[place], holes[place + 1]
                    if place == len(args) - 1 and named:
                        last = min(named.values())
                else:
                    if place not in named:
                        continue
                    first = named[place]
                    last = min(end for end in ends if end > first) if any(e > first for e in ends) else first
                for hole in range(first, last):
                    call.written.setdefault(id(call.records[hole]), []).append(hole)
        call.signature = self._signature(call, tuple(key), geometries, bool(elsewhere))
        call.signature.same = same
        if operator.updates_lists:
            measured = self.device is not None and call.signature.calls < Signature.SETTLED
            if not (call.opaque or call.complex or measured):
                self.updates[key_of(func, tensors, call.records)] = call.signature
        return call

    def _elsewhere(self, device: torch.device | None, tensors: list[torch.Tensor]) -> str:
        """The type of a device other than ours where results may be (`meta`, too); "" if they are here."""
        ours = self.ledger.device_type
        if device is not None:
            kind = place_of(torch.device(device))
            return kind if kind != ours else ""
        return next((tensor.device.type for tensor in tensors if tensor.device.type != ours), "")

    def _signature(
        self, call: Call, key: tuple[Any, ...], geometries: list[Any], elsewhere: bool
    ) -> Signature:
        signature = self.signatures.get(key)
        if signature is None and self.device is not None:
            signature = self.device.young_signature(key)
        if signature is None:
            if len(self.signatures) >= SIGNATURES_LIMIT:
                self.forget_signatures()
            signature = Signature(call.operator, tuple(geometries))
            known = self.costs.get(identity(key)) if self.costs else None
            if known is not None:
                signature.cost, signature.output_bytes = known
                signature.calls = Signature.SETTLED
            elif (self.asks_sizes or self.ledger.budget_bytes is not None) and not elsewhere:
                predicted = shapes.predict(call.func, call.operator, call.template, call.kwargs, geometries)
                if predicted is None:
                    # Not known before the first call: as much as the inputs is the best guess.
                    predicted = sum(record.nbytes for record in call.records) + call.unplain
                signature.output_bytes, signature.guessed = predicted, True
            if self.device is None:
                self.signatures[key] = signature
            else:
                self.device.add_signature(key, signature)
        return signature

    def _promise(self, call: Call) -> None:
        """There is room for its outputs: until they are entered it is nobody else's."""
        self.ledger.promised[id(call)] = threading.get_ident(), call.signature.output_bytes

    def others_end(self) -> bool:
        """Wait until an operator of another thread ends: what it had locked may make room then.

        The caller holds the lock, which the others get meanwhile. False if there is none to wait for.
        """
        own = threading.get_ident()
        if all(thread == own for thread, _ in self.ledger.promised.values()):
            return False
        return self._ended.wait(PATIENCE_SECONDS)

    def _unlock(self, call: Call) -> None:
        """Give back what a call has; what an interrupt has left of that, too."""
        if self.ledger.promised.pop(id(call), None) is not None and self.always:
            self._ended.notify_all()
        while call.changing:
            call.changing[-1].exposed = False
            del call.changing[-1]
        unlock(call.locked)


def call_operator(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator of the program as it would run if our mode were not on."""
    if call.autocast or (call.complex and not inside_another_mode()):
        with as_without_mode(call.autocast):
            return call.func(*args, **kwargs)
    return call.func(*args, **kwargs)
