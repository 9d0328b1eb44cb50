"""A session on a GPU: its budget as the driver sees it, its operators' costs and workspace, its streams.

The session sleeps until CUDA is initialised and an operator touches a GPU: helpers, agents and programs on
the CPU never notice it. What it does then is in docs/design/cuda.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from time import monotonic
from typing import Any

import torch

from dtrrun.ledger.record import Op, Record, Signature
from dtrrun.runtime import storage
from dtrrun.runtime.arguments import outputs_of
from dtrrun.runtime.calls import SIGNATURES_LIMIT, Call
from dtrrun.runtime.cost_model import GPU, modelled_ns
from dtrrun.runtime.cuda_guards import Memory, home
from dtrrun.runtime.cuda_mode import CudaMode
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.graphs import Captures
from dtrrun.runtime.guards import below, lazy_bits
from dtrrun.runtime.holes import fragmented_bytes
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.relief import Relief, retriable
from dtrrun.runtime.rng import put_back
from dtrrun.runtime.shares import Accounts
from dtrrun.runtime.timing import Timer
from dtrrun.settings import RuntimeSettings

NO_LIMIT = 1 << 62
LOOK_AT_HOLES_SECONDS = 10.0  # the allocator's snapshot takes milliseconds
SIDE_STREAM = "tensors that are used on a side stream stay in memory: dtrrun evicts those of the main stream"
NEVER_USED = (
    "this process trained without the GPU, which the budget was for; --device cpu gives the CPU a budget"
)


class Cuda:
    """The parts of a session that know of its GPU, and their state."""

    def __init__(self, gpu: Any, settings: RuntimeSettings, index: int | None) -> None:
        self.gpu = gpu
        self.type: str = gpu.type
        self._index = index
        self._record_dir = settings.record_dir
        self._timed = settings.cost == "measured"
        self.accounts = Accounts(settings.budget_bytes)
        self.timer = Timer(gpu.event)
        self.awake = False
        self.capturing = False
        self._young: dict[Any, Signature] = {}
        self._seen: set[Any] = set()
        self._statistics: Any = None  # as last looked at
        self.side_storages = 0
        self.fragmented = 0
        self._looked_at_holes = 0.0

    # -- the session's ---------------------------------------------------------------------------

    def make_mode(self, session: Any) -> CudaMode:
        """Take part in the session; its dispatch mode."""
        storage.use_device(storage.CUDA_ROUNDING, None)
        self._session = session
        self.careful = careful = session.careful
        self.ledger = session.ledger
        self.ledger.limit = min(self.ledger.limit, NO_LIMIT)
        careful.device = session.replay.device = self
        self.relief = Relief(self.gpu, self.accounts, careful, session.warn)
        self.ledger.memory = Memory(self)
        session.replay.guard = lambda: home(self)
        self._captures = Captures(self, session.warn)
        return CudaMode(careful, self)

    def install(self) -> None:
        self._captures.install()

    def remove(self) -> None:
        self._captures.remove()
        if self.awake and self.usable():
            self.gpu.set_cap(None)
        storage.use_device(storage.CPU_ROUNDING, None)

    def usable(self) -> bool:
        return bool(self.gpu.usable())

    def wake(self, device: Any) -> None:
        """An operator is about to touch a GPU for the first time: `device`, or the current one."""
        index = self._index if self._index is not None else getattr(device, "index", None)
        self.gpu.bind(index)
        storage.use_device(storage.CUDA_ROUNDING, self.gpu.index)
        self.awake = True
        self.look()

    def set_budget(self, budget_bytes: int | None) -> None:
        if budget_bytes is None and self.awake and self.usable():
            self.gpu.set_cap(None)
        self.accounts.set_budget(budget_bytes)
        self.look()

    def step_ended(self) -> None:
        self.accounts.step_ended()
        if self.awake and not self.capturing and monotonic() - self._looked_at_holes > LOOK_AT_HOLES_SECONDS:
            self._looked_at_holes = monotonic()
            self.fragmented = fragmented_bytes(self.gpu.segments(NO_LIMIT))
        self.look()

    def ended(self, steps: int) -> None:
        """The process ends."""
        if not self.awake and steps:
            self._session.warn(NEVER_USED)

    def counters(self) -> dict[str, int]:
        found = self._statistics
        return {
            "reserved_bytes": found.reserved if found else 0,
            "reserved_peak_bytes": found.reserved_peak if found else 0,
            "overhead_bytes": self.accounts.overhead,
            "guard_bytes": self.accounts.guard,
            "cap_bytes": self.accounts.cap or 0,
            "device_index": self.gpu.index,
            "oom_retries": self.relief.retries,
            "fragmented_bytes": self.fragmented,
        }

    # -- the budget ------------------------------------------------------------------------------

    def look(self) -> None:
        """Measure what the device's memory is taken by; set the allocator's cap and the ledger's limit."""
        if not self.awake or self.capturing or not self.usable():
            return
        with self.careful.lock:
            ledger, accounts = self.ledger, self.accounts
            ledger.drain()
            self._statistics = found = self.gpu.statistics()
            used, _ = self.gpu.used_and_total()
            driver = None
            if self._record_dir is not None:
                driver = driver_bytes(self._record_dir, os.getpid())
            before = accounts.cap
            accounts.look(found.reserved, used, driver, monotonic())
            if accounts.cap is None:
                return
            if accounts.cap != before and not self.relief.lifted:
                self.gpu.set_cap(accounts.cap)
                ledger.beside = {
                    "CUDA context and libraries": accounts.overhead,
                    "kept free beside them": accounts.guard,
                }
            self._limit(found)

    def _limit(self, found: Any) -> None:
        ledger, cap = self.ledger, self.accounts.cap
        if ledger.budget_bytes is None or ledger.limit >= NO_LIMIT:
            return  # someone keeps everything in memory for now
        ledger.limit = self.accounts.limit(found.allocated, ledger.resident_bytes)
        ledger.reach = ledger.limit + self.accounts.slack
        if ledger.resident_bytes > ledger.limit:
            over_budget = ledger.over_budget
            with below(), suppress(BudgetError):
                ledger.make_room(0, "the GPU's budget")
            ledger.over_budget = over_budget  # the operators count it
        if found.reserved > cap:
            self.gpu.empty_cache()

    # -- operators -------------------------------------------------------------------------------

    def young_signature(self, key: Any) -> Signature | None:
        """A signature that the short cut is not to know yet: its first calls are measured."""
        signature = self._young.get(key)
        if signature is not None and signature.calls >= Signature.SETTLED:
            self.careful.signatures[key] = self._young.pop(key)
        return signature

    def add_signature(self, key: Any, signature: Signature) -> None:
        if len(self._young) >= SIGNATURES_LIMIT:
            self._young.clear()
        self._young[key] = signature

    def call(self, call: Call, args: Any, kwargs: dict[str, Any], rng: Any) -> Any:
        """Run one operator of the program: timed, measured, and again after an out-of-memory error."""
        signature = call.signature
        call.needed = -1
        if self.capturing:
            return _run(call, args, kwargs)
        self.timer.poll()
        measured = signature.calls < 2  # the first call may set up libraries, or try several kernels
        state = [self.gpu.statistics() if measured else None]
        first = [True]

        def run() -> Any:
            if not first[0]:
                state[0] = self.gpu.statistics()
                if rng is not None:
                    put_back(rng)
            first[0] = False
            start = self.timer.begin() if self._timed and signature.calls < Signature.SETTLED else None
            try:
                result = _run(call, args, kwargs)
            except BaseException:
                if start is not None:
                    self.timer.dropped(start)
                raise
            if start is not None:
                self.timer.end(signature, start)
            return result

        if retriable(call.operator, random_state_known=rng is not None):
            result = self.relief.attempt(run, call.operator.name, signature.output_bytes)
        else:
            result = run()
        if state[0] is not None:
            call.needed = _taken(state[0], self.gpu.statistics())
        return result

    def replay(self, op: Op, run: Any) -> Any:
        """Run a recorded operator."""
        operator = op.signature.operator
        if retriable(operator, random_state_known=True):
            return self.relief.attempt(run, operator.name, op.signature.output_bytes)
        return run()

    def price(self, call: Call, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """The cost of a signature: the model's, until the timer has read one."""
        signature = call.signature
        if not signature.calls and not signature.timed:
            nbytes = sum(record.nbytes for record in call.records) + signature.output_bytes
            signature.cost = modelled_ns(call.func, args, kwargs, result, nbytes, GPU)
        if signature.calls < Signature.SETTLED:
            signature.calls = signature.calls + 1 if self._timed else Signature.SETTLED

    def finished(self, call: Call, signature: Signature, result: Any) -> None:
        """An operator's results are in the ledger."""
        if call.needed >= 0:
            if signature.calls == 2:
                signature.output_bytes = min(call.needed, signature.output_bytes)
            elif signature.calls == 1 and not call.operator.dynamic:
                signature.output_bytes = call.needed
            else:
                signature.output_bytes = max(call.needed, signature.output_bytes)
        if self.gpu.on_side_stream() and not self.capturing:
            self._pin_side(call, result)
        if call.operator not in self._seen:
            self._seen.add(call.operator)
            self.look()  # its kernels have been loaded, perhaps a library's

    def _pin_side(self, call: Call, result: Any) -> None:
        """What two streams use must not be freed on the word of one of them."""
        touched = [self.ledger.records.get(record.key) for record in call.records]
        touched += [self.careful.record_of(tensor) for tensor in outputs_of(result, [])]
        for record in touched:
            if record is not None and record.nbytes and record.pin != "side stream":
                self._keep(record, "side stream")
                self.side_storages += 1
        if self.side_storages:
            self._session.warn(SIDE_STREAM)

    def _keep(self, record: Record, why: str) -> None:
        self.ledger.make_constant(record, why)

    def forgives(self, operator: Operator, error: BaseException) -> bool:
        """Whether an operator of the short cut that raised `error` is going to run again."""
        return (
            isinstance(error, torch.OutOfMemoryError)
            and not isinstance(error, BudgetError)
            and self.ledger.budget_bytes is not None
            and retriable(operator, random_state_known=False)
        )


def _run(call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
    if call.complex:
        with lazy_bits():
            return call.func(*args, **kwargs)
    return call.func(*args, **kwargs)


def _taken(before: Any, after: Any) -> int:
    """Bytes that a call took at its peak, or a little more, without a reset of the program's statistics.

    Two bounds: all that was handed out meanwhile, and how far the peak now lies above what there was. The
    second is exact where the call has raised the peak.
    """
    return int(min(after.total - before.total, after.peak - before.allocated))


def driver_bytes(record_dir: str, pid: int) -> int | None:
    """What the launcher last saw the driver show for this process."""
    from dtrrun.telemetry import driver

    return driver.read(record_dir, pid)
