"""What C++ asks while it handles the program's operators (`native/interposer.h`), one question at a time.

Who a storage belongs to that is new to the session, what the kernel of another library reads, which results
are new memory, whether another thread has to end first. Also what the parts of a session share: its lock, its
turns, and the time that is its own.
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
from dtrrun.core.operator import Output
from dtrrun.runtime.dispatch.arguments import (
    flatten_into,
    is_leaf,
    outputs_of,
    parts_of,
)
from dtrrun.runtime.dispatch.kernels import Reading, has_python_kernel, reading_of
from dtrrun.runtime.dispatch.outputs import new_storages
from dtrrun.runtime.dispatch.signatures import Signatures
from dtrrun.runtime.dispatch.turns import Turns
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.guards import below
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
PATIENCE_SECONDS = 1.0  # for operators of other threads, which may be waiting for one another
PATIENCE_WITH_USERS_NS = 30_000_000_000  # for other threads that use memory about to be moved
POLL_SECONDS = 0.01
BRIEF_NS = 100_000  # our own work in Python hardly ever takes longer unless it is interrupted

_onednn: Any = torch.ops.mkldnn
CAN_ASK_ONEDNN = hasattr(_onednn, "data_ptr") and hasattr(_onednn, "_nbytes")


class Reasons:
    """Why operators are handled with care: other threads, or code of libraries, may do something in between.

    With a reason, each operator takes a lock. C++ asks `before_operator` of those that write while another
    thread has given up its turn, and of all in composite operators of libraries, whose parts are followed
    (`before_finish`, `after_finish`).
    """

    __slots__ = ("_end_counting", "all", "any")

    def __init__(self, end_counting: Callable[[], None]) -> None:
        self.all: set[str] = set()
        self.any = False
        self._end_counting = end_counting

    def add(self, why: str) -> None:
        self.all.add(why)
        self.any = True
        self._end_counting()

    def remove(self, why: str) -> None:
        self.all.discard(why)
        self.any = bool(self.all)


class Callbacks:
    """Answers C++, for one session."""

    __slots__ = ("__dict__", "home_thread", "next_tick", "waiting")  # C++ reads these

    def __init__(
        self,
        dtr: DTR,
        signatures: Signatures,
        lock: Any,
        ended: threading.Condition,
        *,
        device: Any,
        kernels: dict[Any, Any],
        tick: Callable[[], None],
        met_leaf: Callable[[torch.Tensor], None],
        met_thread: Callable[[], None],
        too_small: Callable[..., None],
        alert: Callable[[str], None],
        native: Any,
    ) -> None:
        """lock: of the session (`turns.lock_of_session`). ended: a condition of it, notified when an operator
        has ended. device: the session's, if it is a GPU. kernels: our kernels of composite operators. tick:
        called periodically. met_leaf: called with autograd leaves. met_thread: called when another thread is
        about to run operators. too_small: called with an error that is about to be raised to the program.
        alert: called with a line for the user. native: the extension."""
        self.dtr, self.ledger = dtr, dtr.ledger
        self._operators, self._eviction = dtr.operators, dtr.eviction
        self._rematerializer = dtr.rematerializer
        self.signatures, self.lock, self._ended = signatures, lock, ended
        self.device, self.kernels = device, kernels
        self.tick, self._met_leaf, self.met_thread = tick, met_leaf, met_thread
        self.too_small = too_small
        self.native = native
        self.operators: dict[int, Operator] = {}
        """By the overload's id, since hashing an overload calls Python; its `Operator` keeps it alive."""
        self.reasons = Reasons(dtr.recipes.end_counting)
        self.turns = Turns(lock, ended, self.ledger, self.reasons, native, alert)
        self.next_tick = 0  # ns
        # Our time in `Own`, while the thread ran: in pieces of up to `BRIEF_NS`, and what others take longer.
        self.brief_ns = self.long_ns = 0
        self.waited_ns = 0  # in `Own`, for a processor
        self.waiting = 0  # threads waiting for another thread's operator to end
        self.shared = False  # several threads have run operators
        self.home_thread: int | None = None
        """The thread that takes no lock while there is no other: the main one, or the first one seen."""
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
        """Return the time of what is accounted for elsewhere: evictions, rematerializations, other `Own`."""
        return (
            self._eviction.making_room_ns
            + self._rematerializer.operators_ns
            + self.brief_ns
            + self.long_ns
            + self.waited_ns
        )

    # -- what C++ asks about one operator --------------------------------------------------------

    def about_kernel(self, func: Any, operator: Operator) -> tuple[bool, bool, bool, Reading | None]:
        """Return what is known of a kernel that is not PyTorch's own, and is about to run.

        Whether it can be replayed, whether what it keeps shows in the counts of references, and whether what
        it reads besides its arguments can be put back; and what that is, if it is written in Python.
        """
        replayable = operator.replayable and namespace_of(operator) not in self.stateful
        reading = reading_of(func, self.readings.get(id(func))) if replayable else None
        if reading is not None:
            self.readings[id(func)] = reading
        return replayable, not has_python_kernel(func), reading is None or reading.pure, reading

    def has_kept_tensors(self, operator: Operator) -> None:
        """Note that a native kernel has kept tensors that it was given."""
        if namespace_of(operator) not in PACKED_NAMESPACES:
            self.stateful.add(namespace_of(operator))

    def before_operator(self, changed: Sequence[Version], versions: Sequence[Version]) -> bool:
        """Wait until no other thread uses what an operator will change. versions: of its tensors.

        Returns whether some of them are no longer the present ones of their storages. Raises BudgetError.
        """
        with self.telling():
            return self.turns.wait_for_replays(changed) or any(
                one.about_to_run(versions) for one in self._own_composites()
            )

    def before_finish(self, written: Sequence[Version]) -> None:
        """An operator has run that has written to these versions."""
        for one in self._own_composites():
            one.about_to_finish(written)

    def after_finish(
        self, versions: Sequence[Version], written: Sequence[Version], results: Sequence[torch.Tensor]
    ) -> None:
        """The results of an operator that has read and written these versions are in the ledger."""
        for one in self._own_composites():
            one.finished(versions, written, results)

    def _own_composites(self) -> list[Running]:
        return [one for one in self.composites if one.thread == get_ident()] if self.composites else []

    def given_storages(self, result: Any) -> tuple[list[Version], list[Version]]:
        """Return the versions of storages given to tensors, and which of these the program may write to.

        It may write to those that it holds. C++ holds one only for the call: cuDNN's recurrent layers get
        their weight buffer this way.
        """
        tensors = outputs_of(result, [])
        given = [version for tensor in tensors if (version := self.version_of(tensor)) is not None]
        if until_return() is not None:  # `torch.load`: no other code will hold it
            for version in given:
                version.escaped, version.pin = False, "loaded or copied"
            return given, []
        foreign = self.dtr.recipes.foreign
        given = [version for version in given if not foreign.undecided(version)]
        storages = list(map(storage_of, tensors))
        return given, given if any(is_held(storage, 1) for storage in storages) else []

    def _count_new(self, tensor: torch.Tensor) -> int:
        before = self.ledger.resident_bytes
        self.count(tensor)
        return self.ledger.resident_bytes - before

    # -- tensors ---------------------------------------------------------------------------------

    def joins(self, index: int) -> bool:
        """Return whether the session uses this GPU, which it may do from now on."""
        ours = self.ledger.device_type
        return place_of(torch.device(ours, index)) == ours

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
        """A first call reads what has been computed, and is a leaf of autograd now."""
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

    def read_escaped(self, tensor: torch.Tensor) -> None:
        """An operator reads an escaped tensor, which may get another version."""
        version = self.version_of(tensor)
        assert version is not None
        evicts = self.signatures.needs_sizes
        self.dtr.recipes.foreign.read(version, is_parameter=is_parameter(tensor), evicts=evicts)

    @staticmethod
    def identity_of(
        operator: Operator,
        args: Any,
        kwargs: dict[str, Any] | None,
        geometries: Sequence[Any],
        more: tuple[Any, ...] = (),
    ) -> tuple[Any, ...]:
        """Return what calls with such tensors, each given as TENSOR_SLOT, have in common in every process.

        more: what else they have.
        """
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
        key.extend(more)
        return tuple(key)

    def refuse(self, error: BudgetError, inputs: Sequence[Version], signature: Signature) -> None:
        """Complete an error that is about to be raised to the program, whose call does not fit.

        It says how much the program's own call needs, even if a recomputation for it failed.
        """
        error.called = signature.operator.name
        error.called_bytes = self._eviction.least_bytes_with(inputs) + signature.output_bytes
        self.too_small(error, inputs, signature)

    def classify(self, result: Any, operator: Operator) -> tuple[Sequence[Output], int, bool]:
        """Classify results that are not plain tensors. May evict: the call's inputs are locked.

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
            return self.turns.wait(PATIENCE_SECONDS) or self._eviction.stops_waiting()
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
                self.turns.wait(POLL_SECONDS)  # custom functions release their locks without notifying
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

    __slots__ = ("_accounted", "_callbacks", "_entered", "_is_long")

    def __init__(self, callbacks: Callbacks, is_long: bool) -> None:
        self._callbacks, self._is_long = callbacks, is_long

    def __enter__(self) -> None:
        if self._is_long:
            without_waits(0)
        self._accounted = self._callbacks.accounted_ns()
        self._entered = now_ns()

    def __exit__(self, *_: object) -> None:
        callbacks = self._callbacks
        took = now_ns() - self._entered - (callbacks.accounted_ns() - self._accounted)
        if took >= BRIEF_NS:
            ran = without_waits(took)
            callbacks.waited_ns += took - ran
            took = ran
        brief = min(took, BRIEF_NS)
        callbacks.brief_ns += brief
        callbacks.long_ns += took - brief


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
