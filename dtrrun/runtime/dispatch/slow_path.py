"""Handles any operator of the program. The common ones take a fast path, in C++ (`dtrrun/native`).

This covers evicted inputs, memory shortage, in-place and random operators, unknown storages, first calls and
several threads. `core.operator` defines what is done for an operator, and in which order; this module
flattens PyTorch's calls for it, and runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import get_ident
from time import perf_counter_ns as now_ns
from typing import TYPE_CHECKING, Any

import torch

from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Signature, Version
from dtrrun.core.locks import Locks
from dtrrun.core.operator import Output
from dtrrun.runtime import rng
from dtrrun.runtime.dispatch.arguments import (
    flatten_into,
    geometry_of,
    holes_in,
    is_leaf,
    outputs_of,
    parts_of,
)
from dtrrun.runtime.dispatch.bodies import Body
from dtrrun.runtime.dispatch.call import TensorCall
from dtrrun.runtime.dispatch.kernels import Reading, has_python_kernel, reading_of
from dtrrun.runtime.dispatch.outputs import new_storages
from dtrrun.runtime.dispatch.signatures import Signatures
from dtrrun.runtime.dispatch.turns import TurnLock, Turns
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.guards import below, program_autocast
from dtrrun.runtime.observe.own_time import without_waits
from dtrrun.runtime.operators import PACKED_NAMESPACES, Operator, operator_of
from dtrrun.runtime.patches.passing import until_return
from dtrrun.runtime.storage import (
    is_for_shapes,
    is_held,
    place_of,
    rounded,
    storage_of,
    type_of,
)

if TYPE_CHECKING:
    from dtrrun.runtime.patches.foreign_composites import Running

UNPLAIN = "no plain storage"
READS_STATE = "made by an operator that reads state of the program"
PATIENCE_SECONDS = 1.0  # for operators of other threads, which may be waiting for one another
PATIENCE_WITH_USERS_NS = 30_000_000_000  # for other threads that use memory about to be moved
POLL_SECONDS = 0.01
BRIEF_NS = 100_000  # our own work in Python hardly ever takes longer unless it is interrupted

_onednn: Any = torch.ops.mkldnn
CAN_ASK_ONEDNN = hasattr(_onednn, "data_ptr") and hasattr(_onednn, "_nbytes")

sees_functions = torch._C._is_torch_function_mode_enabled  # a function mode is on, and not all are disabled


class Reasons:
    """Why every operator takes the slow path. Without a reason, plain operators take the fast path."""

    __slots__ = ("all", "any")

    def __init__(self) -> None:
        self.all: set[str] = set()
        self.any = False

    def add(self, why: str) -> None:
        self.all.add(why)
        self.any = True

    def remove(self, why: str) -> None:
        self.all.discard(why)
        self.any = bool(self.all)


class SlowPath:
    """Handles any operator."""

    __slots__ = ("__dict__", "home_thread", "next_tick", "waiting")  # the native fast path reads these

    def __init__(
        self,
        dtr: DTR,
        signatures: Signatures,
        lock: TurnLock,
        ended: threading.Condition,
        *,
        device: Any,
        kernels: dict[Any, Any],
        tick: Callable[[], None],
        met_leaf: Callable[[torch.Tensor], None],
        met_thread: Callable[[], None],
        too_small: Callable[..., None],
        native: Any,
    ) -> None:
        """ended: a condition of the lock, notified when an operator has ended. device: the session's, if it
        is a GPU. kernels: our kernels of composite operators. tick: called periodically. met_leaf: called
        with autograd leaves. met_thread: called when another thread is about to run operators. too_small:
        called with an error that is about to be raised to the program. native: the extension, which passes
        the operators on."""
        self.dtr, self.ledger = dtr, dtr.ledger
        self._operators, self._eviction = dtr.operators, dtr.eviction
        self._rematerializer = dtr.rematerializer
        self.signatures, self.lock, self._ended = signatures, lock, ended
        self.device, self.kernels = device, kernels
        self.tick, self._met_leaf, self._met_thread = tick, met_leaf, met_thread
        self.too_small = too_small
        self.native = native
        self.operators: dict[int, Operator] = {}
        """By the overload's id, since hashing an overload calls Python; `operator_of` keeps it alive."""
        self.reasons = Reasons()
        self.turns = Turns(lock, ended, self.reasons, native)
        self.next_tick = 0  # ns
        self.operators_ns = 0  # time in the program's own operators
        self.bookkeeping_ns = 0  # our time for operators, without rematerializations and evictions
        # Our time in `Own`, while the thread ran: in pieces of up to `BRIEF_NS`, and what others take longer.
        self.brief_ns = self.long_ns = 0
        self.waited_ns = 0  # in `Own`, for a processor
        self.waiting = 0  # threads waiting for another thread's operator to end
        self.shared = False  # several threads have run operators
        self.home_thread: int | None = (
            None  # the thread that may use the fast path: the main one, or the first one seen
        )
        self.capturing = False  # a CUDA graph: no eviction, no replay
        self.calls: Any = None
        """The notes of `--where` and `--peak` (`CallNotes`). Set them before the session begins."""
        self.stateful: set[str] = set()
        """Namespaces with an operator that has kept a tensor: their results may depend on it."""
        self.readings: dict[int, Reading] = {}
        """What operators whose kernels are written in Python have read, by the overload's id."""
        self.composites: list[Running] = []
        """Native libraries' composite operators that are running, in any thread."""

    def learn(self, func: Any) -> Operator:
        """Return the facts about an operator seen for the first time."""
        operator = self.operators[id(func)] = operator_of(func)
        return operator

    def learn_anew(self, names: set[str]) -> None:
        """Forget the facts about PyTorch's own operators among these, since their kernels have changed."""
        known = [(key, one) for key, one in self.operators.items() if one.name in names]
        if any(one.name.startswith("aten.") for _, one in known):
            for key, _ in known:
                del self.operators[key]
            operator_of.cache_clear()
            self.native.relearn()

    def own(self, *, is_long: bool = False) -> Own:
        """Return a context: what runs there, outside of operators, is our own work.

        is_long: it takes more than `BRIEF_NS`, even if nothing interrupts it.
        """
        return Own(self, is_long)

    def accounted_ns(self) -> int:
        """Return the time of what is accounted for elsewhere: evictions, rematerializations, bookkeeping."""
        return (
            self._eviction.making_room_ns
            + self._rematerializer.operators_ns
            + self.bookkeeping_ns
            + self.brief_ns
            + self.long_ns
            + self.waited_ns
        )

    # -- running an operator ---------------------------------------------------------------------

    def run(self, operator: Operator, func: Any, args: Any, kwargs: dict[str, Any], entered: int) -> Any:
        """Run one operator, which the interposer passed on at the time `entered`.

        Raises what the operator raises, and BudgetError.
        """
        if sees_functions():
            # Some PyTorch functions bypass function modes, and call us with one active.
            with torch._C.DisableTorchFunction():
                return self.run(operator, func, args, kwargs, entered)
        if not self.reasons.any and self.device is None and get_ident() != self.home_thread:
            self._met_thread()  # not started by Python: TorchScript's `fork`
        if operator.random:  # no draws between capturing the generator's state and the call
            with self.lock:
                return self._run(operator, func, args, kwargs, entered)
        return self._run(operator, func, args, kwargs, entered)

    def _run(self, operator: Operator, func: Any, args: Any, kwargs: dict[str, Any], entered: int) -> Any:
        operators, eviction, rematerializer = self._operators, self._eviction, self._rematerializer
        # Evictions and rematerializations are accounted for separately.
        accounted = eviction.making_room_ns + rematerializer.operators_ns
        call: TensorCall | None = None
        storages = Locks()  # until it dies
        try:
            with self.lock:
                if operator.takes_storage:
                    rematerializer.lock(self._storages_in(args), storages)
                while True:
                    call = self._describe(operator, func, args, kwargs)
                    if self.turns.wait_for_replays(call.changed()):
                        continue  # its inputs have other versions now
                    try:
                        if any(one.about_to_run(call) for one in self._own_composites()):
                            continue  # its inputs have other versions now
                        operators.admit(call)
                        if operator.random or operator.foreign:
                            self._capture_rng(call)
                        break
                    except BudgetError:
                        operators.abandon(call)
                        if not (self.others_end() or self.found_garbage(entered)):
                            raise
                # While memory is written to, it still counts as the previous version: no other thread may
                # recompute from it. Foreign kernels run unlocked, since they may wait for another thread.
                if call.written and call.recordable and not operator.foreign:
                    result = self._perform(call, args, kwargs)
            if not call.ended:
                result = self._perform(call, args, kwargs)
        except BaseException as error:
            # Also covers interrupts, before the kernel or between it and its entry in the ledger.
            started = call is not None and call.started
            kernel_ns = now_ns() - started if started else 0
            with self.lock:
                if call is not None:
                    (operators.fail if started else operators.abandon)(call)
                if isinstance(error, BudgetError) and not error.explained:  # before or after the kernel
                    if call is not None:
                        self.refuse(error, call.versions, call.signature)
                    else:
                        self.too_small(error)
            self.bookkeeping_ns += now_ns() - kernel_ns - entered + accounted
            self.bookkeeping_ns -= eviction.making_room_ns + rematerializer.operators_ns
            raise
        self.operators_ns += call.ended - call.started
        left = now_ns()
        self.bookkeeping_ns += left - call.ended + call.started - entered + accounted
        self.bookkeeping_ns -= eviction.making_room_ns + rematerializer.operators_ns
        if left > self.next_tick:
            self.tick()
        return result

    def _perform(self, call: TensorCall, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the kernel of an admitted call, and enter its results."""
        operator = call.operator
        timed = self.device is None and call.signature.calls < Signature.SETTLED
        call.started = now_ns()
        if timed:
            self.native.begins(call.started)
        result = self.call(call) if self.device is None else self.device.call(call)
        call.ended = now_ns()
        cost = call.ended - call.started
        own = self.native.own_ns(cost) if timed else cost
        with self.lock:
            drawn = False
            if operator.foreign and call.rng is not None:
                if rng.moved(call.rng):
                    drawn = self.shared
                else:
                    call.rng = None  # it does not draw
            call.result = result
            composites = self._own_composites()
            for one in composites:
                one.about_to_finish(call)
            self._finish(call, args, kwargs, own)
            for one in composites:
                one.finished(call, result)
            if call.common:
                self.native.remember(call.signature)
            if drawn:
                self._keep_results(call, result)
            if call.kept:  # results are constants, and have not been evicted
                self._hand_out(call.kept)
        return result

    def _own_composites(self) -> list[Running]:
        return [one for one in self.composites if one.thread == get_ident()] if self.composites else []

    def call(self, call: TensorCall) -> Any:
        """Run the kernel of the operator that the interposer has passed on."""
        if not call.operator.foreign:
            return self.native.proceed()
        body = Body(self.dtr, self.lock)
        with body.locks:
            result, reads_unseen, call.kept = self.native.proceed_watched(
                body.touch, not has_python_kernel(call.func)
            )
        if call.kept and namespace_of(call.operator) not in PACKED_NAMESPACES:
            self.stateful.add(namespace_of(call.operator))
        if reads_unseen or call.kept:  # a second call might give another result
            call.recordable = False
            with self.lock:
                given = {version.key: version for version in call.versions}
                keys = [self.ledger.key_of(storage_of(tensor)) for tensor in call.kept]
                call.handed_out = [given[key] for key in keys if key in given]
                for holes in call.written.values():
                    if not call.versions[holes[0]].used:
                        self.dtr.recipes.make_constant(call.versions[holes[0]], "not replayable")
        return result

    def _hand_out(self, tensors: list[torch.Tensor]) -> None:
        """Native code has kept some of a call's results: it can access their memory from now on."""
        versions = [version for tensor in tensors if (version := self.version_of(tensor)) is not None]
        self.dtr.mutation.escape_together(versions, "kept by native code")

    def _finish(self, call: TensorCall, args: Any, kwargs: dict[str, Any], ns: int) -> None:
        """Record the cost of a call that has run, and enter its outputs."""
        ledger, signature, operator, result = self.ledger, call.signature, call.operator, call.result
        if self.device is not None:
            self.device.price(call, args, kwargs)
        elif signature.calls < Signature.SETTLED:
            self.signatures.price(call, args, kwargs, ns)
        call.cost = signature.cost
        outputs: Sequence[Output] = ()
        unplain: Sequence[torch.Tensor] = ()
        given: Sequence[Version] = ()
        if operator.takes_storage:
            given = self._given_storages(call)
        elif not call.view:
            if ledger.dead:
                ledger.collect_dead()  # a new storage may have the id of one that died
            outputs, unplain = new_storages(result, operator, ledger)
            if unplain:
                call.counted = sum([self._count_new(tensor) for tensor in unplain])
        for version in given:
            nbytes = call.resized(0, version)
            if nbytes is not None:
                ledger.resized(version, nbytes)
        if operator.collective:  # it may go on reading when it has returned
            for version in call.versions:
                version.fixed = True
        self._operators.finish(call, outputs, plain=not unplain)
        if operator.collective:  # and writing
            for _, storage, _ in outputs:
                ledger.versions[ledger.key_of(storage)].fixed = True
        if call.reading is not None and not call.reading.pure:
            for _, storage, _ in outputs:
                ledger.versions[ledger.key_of(storage)].pin = READS_STATE
        if self.calls is not None and not call.view:
            self.calls.called()
        if ledger.fingerprints is not None:
            self._note_extents(call, outputs)
        if self.device is not None:
            self.device.finished(call, signature)
        call.result = None

    def _storages_in(self, args: Any) -> list[Version]:
        """Return the versions of the storages given to an operator. PyTorch resizes those that are empty."""
        storages = [one for one in args if isinstance(one, torch.UntypedStorage)]
        return [version for one in storages if (version := self.ledger.version_of(one)) is not None]

    def _given_storages(self, call: TensorCall) -> list[Version]:
        """Return the versions of storages given to tensors; the program may write to those that it holds.

        C++ holds one only for the call: cuDNN's recurrent layers get their weight buffer this way.
        """
        tensors = outputs_of(call.result, [])
        given = [version for tensor in tensors if (version := self.version_of(tensor)) is not None]
        if until_return() is not None:  # `torch.load`: no other code will hold it
            for version in given:
                version.escaped, version.pin = False, "loaded or copied"
            return given
        foreign = self.dtr.recipes.foreign
        given = [version for version in given if not foreign.undecided(version)]
        times = sum(isinstance(one, torch.UntypedStorage) for one in call.template)
        if any(is_held(storage_of(tensor), times) for tensor in tensors):
            call.handed_out = given
        return given

    def _count_new(self, tensor: torch.Tensor) -> int:
        before = self.ledger.resident_bytes
        self.count(tensor)
        return self.ledger.resident_bytes - before

    def _note_extents(self, call: TensorCall, outputs: Sequence[Output]) -> None:
        """Note which part of each new storage is initialised, for comparison under verify."""
        ledger, operator = self.ledger, call.operator
        tensors = outputs_of(call.result, [])
        opaque = [source for source in call.versions if source.nbytes and not source.extent]
        for where, storage, _ in outputs:
            version = ledger.versions[ledger.key_of(storage)]
            if version.operation is None:
                continue
            ledger.fingerprints.note(version, tensors[where])  # type: ignore[union-attr]
            if where == operator.opaque_output or (opaque and not operator.reads_opaque):
                version.extent = 0

    def _keep_results(self, call: TensorCall, result: Any) -> None:
        """Make the results constant: other threads may have drawn after the generator's state was captured.

        Operators known to draw hold the lock. Others must not, since they may wait for another thread.
        """
        keys = [call.versions[holes[0]].key for holes in call.written.values()]
        made = map(self.version_of, outputs_of(result, []))
        keys += [version.key for version in made if version is not None]
        for key in keys:
            self.dtr.recipes.make_constant(self.ledger.versions[key], "drawn among threads")

    def _capture_rng(self, call: TensorCall) -> None:
        """Capture the states of the generators that a call can draw from, if it may have to be repeated."""
        operator = call.operator
        # Its recipe needs them, and so does a retry on a GPU that ran out of memory.
        repeatable = self.device is not None and operator.replayable
        if self.capturing or not (call.recordable or repeatable):
            return
        nbytes = call.signature.output_bytes
        for holes in call.written.values():
            nbytes += call.versions[holes[0]].nbytes
        if operator.foreign:
            call.rng = rng.capture_all(self.device is not None, call.generators, nbytes)
            return
        device = call.kwargs.get("device")
        if device is None and call.tensors:
            device = call.tensors[0].device
        generator = call.generators[0] if call.generators else None
        call.rng = rng.capture(torch.device(device or "cpu"), generator, nbytes)

    # -- tensors ---------------------------------------------------------------------------------

    def version_of(self, tensor: torch.Tensor) -> Version | None:
        """Return the version of a tensor's storage, entered as a constant if it is new; None if there is no
        plain storage, or if it is there for shapes only."""
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):
            self.count(tensor)
            return None
        if tensor.is_nested or tensor.is_quantized:  # not a plain tensor over a storage
            return None
        if self.ledger.dead:
            self.ledger.collect_dead()  # a new storage may have the id of one that died
        version = self.ledger.version_of(storage)
        if version is None:
            if is_for_shapes(storage):
                return None
            held = is_held(storage)
            version = self._operators.adopt(storage)
            if held and not version.escaped:  # the program can read and write unseen through it
                version.escaped, version.pin = True, "handed out"
            if tensor.requires_grad and is_leaf(tensor):
                self._meet(version, tensor)
        for observer in self.ledger.observers:
            observer.met(version)
        return version

    def _meet(self, version: Version, leaf: torch.Tensor) -> None:
        version.pin = "parameter"
        self._met_leaf(leaf)

    def meet_leaf(self, leaf: torch.Tensor) -> None:
        """A first call on the fast path reads what has been computed, and is a leaf of autograd now."""
        version = self.version_of(leaf)
        assert version is not None
        self._meet(version, leaf)

    def count(self, tensor: torch.Tensor) -> int:
        """Account for the memory of a tensor without plain storage, until the tensor dies.

        Returns the bytes.
        """
        ledger = self.ledger
        if type_of(tensor.device) != ledger.device_type:
            return 0
        nbytes = 0
        if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
            if CAN_ASK_ONEDNN:
                with below():
                    address, nbytes = _onednn.data_ptr(tensor), rounded(_onednn._nbytes(tensor))
                ledger.count(tensor, nbytes, address, UNPLAIN)
            return nbytes
        for part in parts_of(tensor):
            storage = storage_of(part)
            version = ledger.version_of(storage)
            if version is None:
                version = self._operators.adopt(storage, pin=UNPLAIN)
                version.escaped = True
            nbytes += version.nbytes
        return nbytes

    # -- taking a call apart ---------------------------------------------------------------------

    def _describe(self, operator: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> TensorCall:
        ledger = self.ledger
        if ledger.dead:
            ledger.collect_dead()
        call = TensorCall(func, operator, ledger.device_type)
        call.measured = self.device is not None
        key: list[Any] = [operator]
        tensors = call.tensors
        call.template = flatten_into(args, key, tensors)
        if kwargs:  # their names are values, and thus part of the key
            named = flatten_into(chain.from_iterable(kwargs.items()), key, tensors)
            call.kwargs = dict(zip(named[::2], named[1::2], strict=True))
        by_value = self.device is not None and call.take_by_value(key)
        elsewhere = self._elsewhere(kwargs.get("device"), tensors)
        if elsewhere:
            key.append(elsewhere)  # unknown to the fast path, which assumes that results are on our device
        if operator.sized_by_numbers:
            key += [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (float, complex))]
        if operator.random or operator.foreign:
            call.generators = operator.generators_of(args, kwargs)
        call.state = self.native.present_state(operator.general, self.device is None)
        dtype = torch.get_default_dtype()
        if dtype is not torch.float32:
            key.append(dtype)  # the default for results
        if operator.calls_others:
            call.autocast = program_autocast(self.native)
        geometries = self._look_up(call)
        key.extend(geometries)
        same: tuple[int, ...] = ()
        if operator.compares_tensors:
            same = tuple(
                next(place for place, other in enumerate(tensors) if other is one) for one in tensors
            )
            key.append(same)
        if operator.opaque_output >= 0:
            key.append(torch.is_grad_enabled())  # without gradients there is no workspace
        call.replayable = (
            operator.replayable
            and not operator.uninitialised
            and not elsewhere
            and not call.opaque
            and not self.native.has_numbers()  # in a replay, a tensor would not count as a number
        )
        if operator.foreign:
            call.replayable = call.replayable and namespace_of(operator) not in self.stateful
            if call.replayable:
                self._look_into(call)
        if operator.mutates or operator.collective:
            _find_written(call)
            if operator.foreign and self.shared:
                call.replayable = False
        if operator.statistics is not None:
            call.find_statistics()
        call.common = not (elsewhere or by_value or call.opaque)
        call.identity = tuple(key)
        call.signature = self.signatures.of(call, call.identity, geometries, elsewhere=bool(elsewhere))
        call.signature.same = same
        return call

    def _look_into(self, call: TensorCall) -> None:
        """Find out what an operator's kernel reads besides its arguments, if it is written in Python."""
        key = id(call.func)
        reading = reading_of(call.func, self.readings.get(key))
        if reading is None:
            return
        self.readings[key] = call.reading = reading
        call.replayable = reading.pure

    def _look_up(self, call: TensorCall) -> list[Any]:
        """Find the versions of a call's tensors. Returns the tensors' geometries."""
        view = call.operator.view
        geometries: list[Any] = []
        for tensor in call.tensors:
            version = self.version_of(tensor)
            if version is None:
                call.opaque = True
                call.unplain += self.count(tensor)
                continue
            if version.escaped and not view:
                version = self._read(version, tensor)
            call.versions.append(version)
            if version.pin is None and tensor.requires_grad and is_leaf(tensor):
                self._meet(version, tensor)
            geometries.append(geometry_of(tensor))
        return geometries

    def _read(self, version: Version, tensor: torch.Tensor) -> Version:
        """Return the version that an operator reads if it is given a tensor over an escaped one."""
        evicts = self.signatures.needs_sizes
        return self.dtr.recipes.foreign.read(version, is_parameter=is_parameter(tensor), evicts=evicts)

    def read_escaped(self, tensor: torch.Tensor) -> None:
        """An operator on the fast path reads an escaped tensor, which may get another version."""
        version = self.version_of(tensor)
        assert version is not None
        self._read(version, tensor)

    def _elsewhere(self, device: torch.device | None, tensors: list[torch.Tensor]) -> str:
        """Return the type of another device that results may be on (or `meta`), or "" if there is none."""
        ours = self.ledger.device_type
        if device is not None:
            kind = place_of(torch.device(device))
            return kind if kind != ours else ""
        for tensor in tensors:
            kind = type_of(tensor.device)
            if kind != ours:
                return kind
        return ""

    # -- for the fast path -----------------------------------------------------------------------

    def identity_of(
        self, operator: Operator, args: Any, kwargs: dict[str, Any] | None, geometries: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return the key that `_describe` makes for a call with such tensors, each given as TENSOR_SLOT."""
        key: list[Any] = [operator]
        flatten_into(args, key, [])
        if kwargs:
            flatten_into(chain.from_iterable(kwargs.items()), key, [])
        if operator.sized_by_numbers:
            key += [arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, (float, complex))]
        dtype = torch.get_default_dtype()
        if dtype is not torch.float32:
            key.append(dtype)
        key.extend(geometries)
        if operator.opaque_output >= 0:
            key.append(torch.is_grad_enabled())
        return tuple(key)

    def refuse(self, error: BudgetError, inputs: Sequence[Version], signature: Signature) -> None:
        """Complete an error that is about to be raised to the program, whose call does not fit.

        It says how much the program's own call needs, even if a recomputation for it failed.
        """
        error.called = signature.operator.name
        error.called_bytes = self._eviction.least_bytes_with(inputs) + signature.output_bytes
        self.too_small(error, inputs, signature)

    def classify(self, result: Any, operator: Operator) -> tuple[Sequence[Output], int, bool]:
        """Classify fast-path results that are not plain tensors. May evict: the call's inputs are locked.

        Returns the new storages, the bytes of results without a plain storage, and whether there are none.
        """
        with self.lock:
            ledger = self.ledger
            if ledger.dead:
                ledger.collect_dead()
            outputs, unplain = new_storages(result, operator, ledger)
            return outputs, sum([self._count_new(tensor) for tensor in unplain]), not unplain

    # -- waiting for others ----------------------------------------------------------------------

    def others_run(self) -> bool:
        """Return whether an operator of another thread has not ended yet. The caller holds the lock."""
        return self.ledger.others_reserve() or self.turns.others()

    def others_end(self) -> bool:
        """Wait until an operator of another thread ends and its locks are released.

        The caller holds the lock, which is released meanwhile. Returns False if there is none, or on timeout,
        unless the budget has been raised instead.
        """
        if not self.others_run():
            return False
        self.waiting += 1
        try:
            return self._ended.wait(PATIENCE_SECONDS) or self._eviction.stops_waiting()
        finally:
            self.waiting -= 1

    def left_by_others(self, version: Version) -> Version:
        """Wait until no other thread uses the memory of a version, which this thread has locked once.

        The caller holds the lock, which is released meanwhile. Returns the storage's current version: others
        may have written to it. Raises RuntimeError if they keep using it.
        """
        ends = now_ns() + PATIENCE_WITH_USERS_NS
        self.waiting += 1
        try:
            while True:
                found = self.ledger.versions.get(version.key) or version
                if found is not version or version.locks < 2:
                    return found
                if now_ns() > ends:
                    raise RuntimeError("another thread does not stop using it")
                self._ended.wait(POLL_SECONDS)  # custom functions release their locks without notifying
        finally:
            self.waiting -= 1

    def found_garbage(self, since_ns: int) -> bool:
        """Return whether a garbage collection justifies retrying what was begun at that time."""
        return self.dtr.garbage.before_refusing(since_ns)

    def tell_waiting(self) -> None:
        """Notify waiting threads, if any, that an operator has ended. The caller holds the lock."""
        if self.waiting:
            self._ended.notify_all()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Context: report a budget error that is about to be raised to the program."""
        try:
            yield
        except BudgetError as error:
            if not error.explained:
                self.too_small(error)
            raise


class Own:
    """A context for work that is neither an operator nor done for one, but costs the program time."""

    __slots__ = ("_accounted", "_entered", "_is_long", "_slow_path")

    def __init__(self, slow_path: SlowPath, is_long: bool) -> None:
        self._slow_path, self._is_long = slow_path, is_long

    def __enter__(self) -> None:
        if self._is_long:
            without_waits(0)
        self._accounted = self._slow_path.accounted_ns()
        self._entered = now_ns()

    def __exit__(self, *_: object) -> None:
        slow_path = self._slow_path
        took = now_ns() - self._entered - (slow_path.accounted_ns() - self._accounted)
        if took >= BRIEF_NS:
            ran = without_waits(took)
            slow_path.waited_ns += took - ran
            took = ran
        brief = min(took, BRIEF_NS)
        slow_path.brief_ns += brief
        slow_path.long_ns += took - brief


def _find_written(call: TensorCall) -> None:
    """Note which versions a call writes to."""
    operator = call.operator
    if operator.collective:
        holes: list[int] = list(range(len(call.versions)))
    elif call.opaque:
        return
    else:
        holes = []
        end = 0
        for place, argument in (*enumerate(call.template), *call.kwargs.items()):
            begin, end = end, end + holes_in(argument)
            if place in operator.mutates:
                holes += range(begin, end)
    for hole in holes:
        call.written.setdefault(id(call.versions[hole]), []).append(hole)
    call.writes = list(call.written.values())


def namespace_of(operator: Operator) -> str:
    namespace: str = operator.name.partition(".")[0]
    return namespace


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or its base, is a parameter: it persists and is not refilled."""
    base = tensor._base
    return any(
        isinstance(one, torch.nn.Parameter) or (one.requires_grad and is_leaf(one))
        for one in ((tensor,) if base is None else (tensor, base))
    )
