"""Everything around an operator that is not the common case.

Inputs that are evicted, memory that runs short, in-place and random operators, unknown storages, first calls,
several threads. The order is the paper's (Sec. 2, figure 1): make the inputs resident and lock them, make
room for the outputs, run, enter the outputs with the recipe that made them, unlock.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.ledger.locks import Locks
from dtrrun.ledger.record import Record, Signature
from dtrrun.runtime import rng
from dtrrun.runtime.arguments import flatten_into, outputs_of
from dtrrun.runtime.calls import Call, call_operator
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.guards import composite
from dtrrun.runtime.mutation import note_mutation, versions_of
from dtrrun.runtime.operators import Operator, operator_of
from dtrrun.runtime.outcomes import Outcomes

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


function_modes = torch._C._len_torch_function_stack


class Careful(Outcomes):
    """The complete handling of an operator; the dispatch mode has the short cut."""

    kernels: dict[Any, Any] = {}  # noqa: RUF012 - of composites that have one of ours; set by the session
    home: int | None = None  # the thread for which the short cut is: the main one, or else the first to come
    met_thread: Any = None  # set by the session: another thread runs operators

    def learn(self, func: Any) -> Operator:
        operator = self.operators[func] = operator_of(func)
        if operator.lazy_bits:
            self.take_all("lazy bits")  # the short cut does not look for conjugate and negative views
        if operator.checks_modes:
            self.checks_modes = True
        return operator

    def run(
        self,
        mode: Any,
        operator: Operator,
        func: Any,
        types: Any,
        args: Any,
        kwargs: dict[str, Any],
        entered: int,
    ) -> Any:
        if not function_modes():
            return self._run_any(mode, operator, func, types, args, kwargs, entered)
        # Some of PyTorch's functions let no function mode hear of them, and call us with one on.
        with torch._C.DisableTorchFunction():
            return self._run_any(mode, operator, func, types, args, kwargs, entered)

    def _run_any(
        self,
        mode: Any,
        operator: Operator,
        func: Any,
        types: Any,
        args: Any,
        kwargs: dict[str, Any],
        entered: int,
    ) -> Any:
        if not self.always and self.device is None and get_ident() != self.home:
            self.met_thread()  # not one of Python's, or its guest would have said so: TorchScript's `fork`
        for cls in types:
            if cls.__module__.startswith("torch._subclasses."):
                return func(*args, **kwargs)  # fake tensors have no memory, and nobody else would take them
            if (
                cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
                and cls is not torch.nn.Parameter
            ):
                return NotImplemented  # a subclass with a dispatch of its own: its plain operators come to us
        if operator.higher_order:
            return self._run_higher_order(mode, func, args, kwargs)
        if operator.composite:
            with composite(operator), mode:
                kernel = self.kernels.get(func)
                return kernel(*args, **kwargs) if kernel else func._op_dk(COMPOSITE, *args, **kwargs)
        if operator.random:  # nothing may draw between the capture of the generator's state and the call
            with self.lock:
                return self._run(mode, operator, func, args, kwargs, entered)
        return self._run(mode, operator, func, args, kwargs, entered)

    def _run(
        self, mode: Any, operator: Operator, func: Any, args: Any, kwargs: dict[str, Any], entered: int
    ) -> Any:
        ledger = self.ledger
        replay = self.replay
        elsewhere = ledger.making_room_ns + replay.operators_ns  # what others account for
        call: Call | None = None
        started = 0
        try:
            with self.lock:
                while True:
                    call = self._prepare(operator, func, args, kwargs)
                    try:
                        self._admit(call)
                        recipe_rng = self._capture_rng(call)
                        break
                    except BudgetError as error:
                        self._unlock(call)
                        if not self.others_end():
                            self._note_call(error, operator.name, call.records, call.signature.output_bytes)
                            self.too_small(error)
                            raise
            versions = versions_of(call) if operator.unversioned else None
            started = now_ns()
            if self.device is not None:
                result = self.device.call(call, args, kwargs, recipe_rng)
            elif call.complex or call.autocast:
                result = call_operator(call, args, kwargs)
            else:
                result = func(*args, **kwargs)
            ended = now_ns()
            cost = ended - started
            if versions:
                note_mutation(versions)
            with self.lock:
                threads = operator.foreign and "threads" in self._reasons
                drawn = threads and recipe_rng is not None and rng.moved(recipe_rng)
                self._finish(call, args, kwargs, result, cost, recipe_rng)
                if drawn:
                    self._keep(call, result)
        except (
            BaseException
        ):  # also an interrupt: before the kernel, or between it and its entry in the ledger
            with self.lock:
                if call is not None:
                    (self._failed if started else self._unlock)(call)
            if not started:
                mode.bookkeeping_ns += now_ns() - entered + elsewhere
                mode.bookkeeping_ns -= ledger.making_room_ns + replay.operators_ns
            raise
        mode.operators_ns += cost
        left = now_ns()
        mode.bookkeeping_ns += left - ended + started - entered + elsewhere
        mode.bookkeeping_ns -= ledger.making_room_ns + replay.operators_ns
        if left > self.next_tick:
            self.tick()
        return result

    def _keep(self, call: Call, result: Any) -> None:
        """Other threads may have drawn between the capture of the generator's state and this operator.

        Those that are known to draw hold the lock. Others must not: they may wait for another thread.
        """
        keys = [call.records[holes[0]].key for holes in call.written.values()]
        made = map(self.record_of, outputs_of(result, []))
        keys += [record.key for record in made if record is not None]
        for key in keys:
            self.ledger.make_constant(self.ledger.records[key], "drawn among threads")

    def make_ready(self, inputs: list[Record], signature: Signature) -> int:
        """For the short cut: bring the inputs back and make room for the outputs.

        Returns the ns of that which are accounted for elsewhere. Raises BudgetError.
        """
        ledger, replay = self.ledger, self.replay
        elsewhere = ledger.making_room_ns + replay.operators_ns
        with self.lock:
            locks = Locks()
            try:
                with locks:
                    self.replay.lock(inputs, locks.taken)
                    ledger.make_room(signature.output_bytes, signature.operator.name)
                    if signature.workspace:
                        self.device.provide(signature)
            except BudgetError as error:
                self._note_call(error, signature.operator.name, inputs, signature.output_bytes)
                self.too_small(error)
                raise
        return ledger.making_room_ns + replay.operators_ns - elsewhere

    def _note_call(self, error: BudgetError, name: str, records: list[Record], output_bytes: int) -> None:
        """What the program's call takes at least, whatever has failed on the way to it."""
        error.called = name
        error.called_bytes = self.ledger.least_bytes_with(records) + output_bytes

    def _run_higher_order(self, mode: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`torch.cond` and kin: their bodies run under the mode, their operands are in memory."""

        def seen(value: Any) -> Any:
            if callable(value) and not isinstance(value, (torch.Tensor, type)):

                def body(*inner: Any, **named: Any) -> Any:
                    with mode:
                        return value(*inner, **named)

                return body
            return value

        tensors: list[torch.Tensor] = []
        for arg in (*args, *kwargs.values()):
            flatten_into(arg, [], tensors)
        records = [record for tensor in tensors if (record := self.record_of(tensor)) is not None]
        locks = Locks()
        with locks:
            with self.lock:
                self.replay.lock(records, locks.taken)
            return func(*map(seen, args), **{name: seen(arg) for name, arg in kwargs.items()})

    def _admit(self, call: Call) -> None:
        """Bring the inputs back, rescue what a mutation would lose, make room."""
        ledger = self.ledger
        if not call.operator.untouching:
            self.replay.lock(call.records, call.locked)
        else:
            for record in call.records:
                record.locks += 1
                call.locked.append(record)
        if call.opaque:
            for record in call.records:
                ledger.expose(record, "shared with a tensor without plain storage")
        if call.written:
            self._prepare_mutation(call)
        if call.operator.statistics is not None and call.operator.statistics.updates:
            statistics = [call.records[hole] for hole in self._statistics_of(call)]
            for record in statistics:
                ledger.make_constant(record, "running statistics")
            ledger.about_to_change(statistics, call.changing)
        ledger.make_room(call.signature.output_bytes, call.operator.name)
        self._promise(call)

    def _capture_rng(self, call: Call) -> Any:
        """The state of the generators that a call can draw from, if its recipe may need it."""
        operator = call.operator
        if not (operator.random or operator.foreign) or not call.recordable or self.capturing:
            return None
        nbytes = call.signature.output_bytes + sum(
            call.records[holes[0]].nbytes for holes in call.written.values()
        )
        if operator.foreign:
            return rng.capture_all(self.device is not None, call.generators, nbytes)
        device = call.kwargs.get("device")
        if device is None and call.tensors:
            device = call.tensors[0].device
        generator = call.generators[0] if call.generators else None
        return rng.capture(torch.device(device or "cpu"), generator, nbytes)

    def unbegun(self, operator: Operator, error: BaseException) -> bool:
        """Whether an in-place operator of the short cut that raised `error` has certainly not written yet."""
        return self.device is not None and self.device.forgives(operator, error)
