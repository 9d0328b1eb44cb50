"""A session on a GPU: its budget as the driver sees it, its operators' costs and workspace, its streams.

The session sleeps until CUDA is initialised and an operator touches a GPU: helpers, agents and programs on
the CPU never notice it. What it does then is in docs/design/cuda.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from time import monotonic
from typing import Any

from dtrrun.runtime import storage
from dtrrun.runtime.cuda_calls import CudaCalls
from dtrrun.runtime.cuda_guards import Memory, home
from dtrrun.runtime.cuda_mode import CudaMode
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.graphs import Captures
from dtrrun.runtime.guards import below
from dtrrun.runtime.holes import fragmented_bytes
from dtrrun.runtime.relief import Relief
from dtrrun.runtime.shares import SEGMENT, Accounts
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry import driver

NO_LIMIT = 1 << 62
LOOK_AT_HOLES_SECONDS = 10.0  # the allocator's snapshot takes milliseconds
BLIND = (
    "the program's CUDA allocator gives no statistics: the budget holds for tensors alone, "
    "not for what the driver shows"
)
DID_WITHOUT = (
    "a GPU library asked for more memory than was free, and did without: it may have taken another "
    "algorithm, and its results may have other bits than without a budget"
)
NEVER_USED = (
    "this process trained without the GPU, which the budget was for; --device cpu gives the CPU a budget"
)


class Cuda(CudaCalls):
    """The parts of a session that know of its GPU, and their state."""

    def __init__(self, gpu: Any, settings: RuntimeSettings, index: int | None) -> None:
        super().__init__(gpu, settings)
        self.type: str = gpu.type
        self._index = index
        self._record_dir = settings.record_dir
        self.accounts = Accounts(settings.budget_bytes)
        self.awake = False
        self.uuid = ""  # of the device, once it is known
        self._statistics: Any = None  # as last looked at
        self.fragmented = 0
        self._looked_at_holes = 0.0

    # -- the session's ---------------------------------------------------------------------------

    def make_mode(self, session: Any) -> CudaMode:
        """Take part in the session; its dispatch mode."""
        storage.use_device(storage.CUDA_ROUNDING, None)
        self._session = session
        self.careful = careful = session.careful
        self.ledger = session.ledger
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
        self._lift()
        storage.use_device(storage.CPU_ROUNDING, None)

    def _lift(self) -> None:
        if self.awake and not self._blind and self.usable():
            self.gpu.set_cap(None)

    def usable(self) -> bool:
        return bool(self.gpu.usable())

    def wake(self, device: Any) -> None:
        """An operator is about to touch a GPU for the first time: `device`, or the current one."""
        with self.careful.lock:
            if self.awake:
                return
            self.gpu.bind(device.index if self._index is None else self._index)
            self.uuid = self.gpu.uuid()
            storage.use_device(storage.CUDA_ROUNDING, self.gpu.index)
            try:
                self.relief.unseen(self.gpu.statistics().ooms)  # those before our time
            except RuntimeError:
                self._blind = True
                self._session.warn(BLIND)
            self.awake = True
            self.look()

    def set_budget(self, budget_bytes: int | None) -> None:
        if budget_bytes is None:
            self._lift()
        self.accounts.set_budget(budget_bytes)
        self.look()

    def step_ended(self) -> None:
        self.accounts.step_ended()
        if self.awake and not self.capturing:
            self.timer.poll()
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
        if not self.awake or self.capturing or self._blind or not self.usable():
            return
        with self.careful.lock:
            ledger, accounts = self.ledger, self.accounts
            ledger.drain()
            self._statistics = found = self.gpu.statistics()
            if self.relief.unseen(found.ooms):
                self._session.warn(DID_WITHOUT)
            used, _ = self.gpu.used_and_total()
            if self.gpu.statistics().reserved != found.reserved:
                return  # another thread's operator: the two do not belong together; look again soon
            shown = None if self._record_dir is None else driver_bytes(self._record_dir)
            before = accounts.cap
            accounts.look(found.reserved, used, shown, monotonic())
            if accounts.cap is None:
                return
            if not self.relief.lifted and (accounts.cap != before or not self.gpu.cap_stands()):
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
            with (guard := below()), guard, suppress(BudgetError):
                ledger.make_room(0, "the GPU's budget")
            ledger.over_budget = over_budget  # the operators count it
        # By a page less one byte it exceeds the cap by itself, which the guard has room for.
        if cap is not None and found.reserved > cap + SEGMENT:
            self.gpu.empty_cache()


def driver_bytes(record_dir: str) -> tuple[int, float] | None:
    """What the launcher last saw the driver show for this process, and when (s, monotonic)."""
    figure = driver.read_figure(record_dir, os.getpid())
    if figure is None or figure.source not in driver.PER_PROCESS:
        return None
    return figure.nbytes, figure.monotonic_ns / 1e9
