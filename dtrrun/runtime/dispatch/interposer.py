"""Connects a session to the native interposer (`dtrrun/native`), which intercepts operators.

The interposer is switched on thread by thread. It handles operators beneath autograd and all modes of the
program, and asks what it does not know.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from types import ModuleType
from typing import Any

import torch

from dtrrun.core.graph import TENSOR_SLOT, Overwritten, Signature, Version
from dtrrun.runtime import formulas, rng, storage
from dtrrun.runtime.cost_model import CPU as CPU_RATES
from dtrrun.runtime.cost_model import flops_of, has_formula
from dtrrun.runtime.dispatch.callbacks import Callbacks, Reasons
from dtrrun.runtime.dispatch.threads import Threads, joins
from dtrrun.runtime.dispatch.turns import late, wait_while
from dtrrun.runtime.guards import without_our_key
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.patches.registry import Function, Patches

CLASSES = {one.__name__: one for one in (Reasons, Callbacks)}
"""Classes whose slots C++ reads."""

AMPLE, STEADILY_AMPLE = 4, 2
"""Memory is ample while tensors take at most one in so many bytes of the budget; the second: in steps that
all take as much, so that the next one hardly takes far more."""

CPU = torch.device("cpu")
NO_KEYWORDS: dict[str, Any] = {}


class Interposer:
    """The interposer of one session, from `begin` until `end`; answers questions of C++."""

    device_type = "cpu"
    size_class = torch.Size
    place = CPU
    rates = CPU_RATES
    overwritten = Overwritten  # C++ makes them for recipes, also after the session
    times = False  # first calls, on a GPU
    model: Any = None
    """For tests: an object that runs kernels in place of a GPU (`run`), and has its `is_current` and
    `on_side_stream`."""

    def __init__(
        self,
        native: ModuleType,
        callbacks: Callbacks,
        noticed: Callable[[], None],
        alert: Callable[[str], None],
    ) -> None:
        """noticed, alert: as `Threads` takes them."""
        self.native, self.callbacks = native, callbacks
        self.threads, self._alert = Threads(native, noticed, alert), alert
        self.ledger, self.recipes = callbacks.ledger, callbacks.dtr.recipes
        self.prices = callbacks.signatures.modelled  # the cost model says what first calls cost
        self.counts_backward = not callbacks.signatures.modelled  # what is only counted has no cost
        self.mask = storage.MASK
        self.touch: Callable[[Version, Callable[[], bool]], None] | None = None
        self._patches = Patches(lasting=True)  # the compiler runs higher-order operators, too
        self._is_shared = False
        self.running = False
        self._faults = native.faults()
        self._ended = (0, 0, 0, 0, 0)
        self._ended_calls: tuple[dict[str, int], dict[str, int]] = ({}, {})

    # -- times -----------------------------------------------------------------------------------

    def _counters(self) -> tuple[int, int, int, int, int]:
        found: tuple[int, int, int, int, int] = self.native.counters() if self.running else self._ended
        return found

    @property
    def operators_ns(self) -> int:
        """Time in the program's own operators, without those in `brief_ns`."""
        return self._counters()[0]

    @property
    def bookkeeping_ns(self) -> int:
        """Our time, without rematerializations and evictions, and without what is in `brief_ns`."""
        return self._counters()[1]

    @property
    def brief_ns(self) -> tuple[int, int, int]:
        """Time while the thread runs: in brief operators, of our own around operators, and its cold part."""
        return self._counters()[2:]

    # -- counts ----------------------------------------------------------------------------------

    @property
    def native_calls(self) -> dict[str, int]:
        """How often the interposer has handled each operator without asking about it, by name."""
        found: dict[str, int] = self.native.native_calls() if self.running else self._ended_calls[0]
        return found

    @property
    def python_calls(self) -> dict[str, int]:
        """How often it has asked about a call of each operator, not only about the first, by name."""
        found: dict[str, int] = self.native.python_calls() if self.running else self._ended_calls[1]
        return found

    @property
    def read_by_address(self) -> int:
        """How often code other than operators has touched an evicted storage."""
        found: int = self.native.faults() - self._faults
        return found

    # -- operators -------------------------------------------------------------------------------

    def facts_of(self, func: Any) -> Operator:
        """Return the facts about an operator."""
        return self.callbacks.operators.get(id(func)) or self.callbacks.learn(func)

    def formula_of(self, func: Any) -> str | None:
        """Return the name of the formula for an operator's allocations; None if it has none."""
        operator = self.facts_of(func)
        return formulas.name_of(func, operator) if operator.simple else None

    @staticmethod
    def counts_flops(func: Any) -> bool:
        """Return whether the cost model knows an operator's FLOPs."""
        return has_formula(func)

    @staticmethod
    def flops(func: Any, args: Any, kwargs: dict[str, Any] | None, result: Any) -> int:
        """Return the FLOPs of a call."""
        return flops_of(func, args, kwargs or NO_KEYWORDS, result)

    def first_call(
        self,
        signature: Signature,
        func: Any,
        template: list[Any],
        kwargs: dict[str, Any] | None,
        nbytes: int,
        predicted: int | None,
        more: tuple[Any, ...],
        elsewhere: bool,
    ) -> None:
        """Enter what is known about a first call whose tensors take `nbytes` bytes.

        predicted: the bytes that it allocates according to a formula, if there is one. more: as in
        `identity_of`. elsewhere: its results are not on the session's device.
        """
        callbacks, named = self.callbacks, kwargs or NO_KEYWORDS
        with callbacks.own(is_long=True):
            operator = self.facts_of(func)
            key = callbacks.identity_of(operator, template, named, signature.geometries, more)
            callbacks.signatures.foretell(
                signature, key, func, template, named, nbytes, lambda: predicted, elsewhere=elsewhere
            )

    def capture(self, nbytes: int, generators: Sequence[torch.Generator]) -> rng.Captured:
        """Return the state of the generator from which an operator is about to draw `nbytes` bytes.

        generators: those among its arguments.
        """
        return rng.capture(self.place, generators[0] if generators else None, nbytes)

    def capture_all(self, nbytes: int, generators: Sequence[torch.Generator]) -> rng.Captured:
        """Like `capture`, for an operator that may draw from any generator."""
        return rng.capture_all(self.callbacks.device is not None, generators, nbytes)

    @staticmethod
    def has_drawn(captured: rng.Captured) -> bool:
        """Return whether any of the generators has been drawn from since."""
        return rng.moved(captured)

    @staticmethod
    def replaying(captured: rng.Captured) -> rng.replaying:
        """Return a context in which generators are in these states again."""
        return rng.replaying(captured)

    def given_up(self, reads: Sequence[Version]) -> AbstractContextManager[None]:
        """Return a context in which other threads have their turns. reads: what is read there, and locked."""
        return self.callbacks.turns.given_up(reads)

    def touched(self, version: Version) -> None:
        """Bring back an evicted storage: code that is not an operator touches its memory, and waits."""
        assert self.touch is not None
        self.touch(version, self.native.settle)

    def count_only(self, *, steady: bool = False) -> None:
        """Between two steps: only count operators from now on, if memory is ample (`native/counting.h`).

        Otherwise those of backward passes that make little (`counts_backward`). steady: the last steps have
        taken as much memory as each other.
        """
        self.native.count_only(STEADILY_AMPLE if steady else AMPLE, self.counts_backward)

    def adopt_counted(self) -> None:
        """Enter what operators that were only counted have made, so that it may leave for the host.

        What neither Python nor a leaf's gradient refers to can't be found, and stays.
        """
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        self.native.adopt_counted(tensors)

    # -- in PyTorch's Python ---------------------------------------------------------------------

    def install(self) -> None:
        self.threads.install()
        # Higher-order operators (`torch.cond`) look for a Python kernel for each active key.
        self._patches.wrap(torch._ops, "key_extractor", _without_our_key)

    def remove(self) -> None:
        self._patches.undo()
        self.threads.remove()

    # -- threads ---------------------------------------------------------------------------------

    def join(self) -> None:
        """Note that this thread, which is not the one that the session began with, is about to use it."""
        joins()
        if get_ident() != self.callbacks.home_thread:  # perhaps not started by Python: TorchScript's `fork`
            self.callbacks.met_thread()

    def begin(self) -> None:
        self.native.open(self, CLASSES, TENSOR_SLOT, self.device_type)
        self.running = True
        storage.use_objects(self.native.storage_of)
        self.callbacks.signatures.on_forget = self.native.forget
        self.threads.begin()
        self.native.watch_faults()

    def end(self) -> None:
        self._ended = self._counters()
        self._ended_calls = self.native_calls, self.python_calls
        self.running = False
        self.threads.end()
        self.native.close()
        storage.use_objects(None)

    def share(self, reasons: Reasons) -> None:
        """Several threads use the session from now on: make them take turns."""
        if not self._is_shared:
            self.lock_operators(reasons)  # threads already there do not take turns yet
            self.native.share()
            self._is_shared = True
            reasons.remove("threads")

    def lock_operators(self, reasons: Reasons) -> None:
        """Make all operators take the lock, and wait until no other thread is in one without."""
        reasons.add("threads")
        if not wait_while(self.native.is_inside):
            self._alert(late(self.callbacks.home_thread or 0))

    def look(self) -> None:
        """Enter threads whose start was not seen, and reinstall the fault handler."""
        self.threads.look()
        self.native.watch_faults()  # the program may have replaced our handler


def _without_our_key(original: Function) -> Function:
    def key_extractor(tensors: Any, keys: Any) -> Any:
        return original(tensors, without_our_key(keys))

    return key_extractor
