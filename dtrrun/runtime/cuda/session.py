"""A session on a GPU: its budget as seen by the driver, its operators' costs and workspace, its streams.

The session sleeps until CUDA is initialized and an operator uses a GPU, so helpers, agents and programs on
the CPU are unaffected. Its work is described in docs/design/cuda.md.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Mapping
from time import monotonic, sleep
from types import ModuleType
from typing import Any

from dtrrun.core.dtr import DTR
from dtrrun.core.ledger import UNLIMITED
from dtrrun.runtime import storage
from dtrrun.runtime.cuda.budget import SEGMENT, Accounts, sufficient_budget
from dtrrun.runtime.cuda.fragmentation import fragmented_bytes
from dtrrun.runtime.cuda.graphs import Captures
from dtrrun.runtime.cuda.guards import CudaMemory, on_main_stream
from dtrrun.runtime.cuda.interposer import CudaInterposer
from dtrrun.runtime.cuda.oom_retry import Retry
from dtrrun.runtime.cuda.operators import CudaOperators
from dtrrun.runtime.cuda.pools import Pools
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.guards import below
from dtrrun.runtime.patches.registry import lack, lacked
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import format_size
from dtrrun.telemetry import driver

CONTEXT = "CUDA context and libraries"
OF_TENSORS = ("resident_bytes", "peak_bytes", "evicted_bytes")
GUARD = "kept free beside them"
WORKSPACES = "workspaces of libraries"
POOLS = "free in the program's own memory pools"
FORBIDDEN = "forbidden by the program's own set_per_process_memory_fraction"
ASK_SECONDS = 1.0  # between driver queries, which may take milliseconds
WAIT_SECONDS = 2.0  # at most, for the launcher's next figure
SETTLE_SECONDS = 0.005
STEPS_SECONDS = 10.0  # a program that has not ended a step for that long has none
LOOK_AT_HOLES_SECONDS = 10.0  # the allocator's snapshot takes milliseconds
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""With this variable, PyTorch asks the driver for each tensor, and its allocator's statistics remain 0."""
BLIND = (
    "the program's CUDA allocator has no statistics: the budget covers only tensors, and the driver may "
    "report more"
)
PROGRAMS_LIMIT = (
    "The program's own set_per_process_memory_fraction allows less than the budget, so a larger budget does "
    "not help"
)
ONE_OF_SEVERAL = "It is cuda:{gpu} that has no room; each GPU may take the whole budget"
CAPTURING = "While a CUDA graph is captured, nothing is evicted"
NEVER_USED = (
    "this process did not use a GPU, so its memory was not limited; --device cpu sets a budget for the CPU"
)
OTHERS = (
    "the memory in use on the device has grown by {size} without the first call of an operator: dtrrun takes "
    "it for another process's, since the driver does not report memory by process"
)


@functools.cache
def settle_at_exit() -> None:
    """Give the autograd engine's threads the GIL once more before the interpreter shuts down.

    After a backward pass, a GPU's thread releases that pass's objects, which needs the GIL. If this happens
    during shutdown, Python ends the thread, and C++ the process ("terminate called without an active
    exception"), though its work is done. This race is PyTorch's own; our bookkeeping makes it likelier.
    """
    atexit.register(sleep, SETTLE_SECONDS)


class Cuda:
    """The GPU-specific parts of a session, and their state.

    There is one for each GPU that the program uses, of which the first is the session's device.
    """

    def __init__(self, gpu: Any, settings: RuntimeSettings, index: int | None) -> None:
        self.gpu = gpu
        self.type: str = gpu.type
        self.operators = CudaOperators(settings, self._loaded)
        self.memory = CudaMemory(self)
        self._index, self._settings = index, settings
        self.parts = [self]
        self.place = 0  # in that list; the device's number in the ledger
        self._record_dir = settings.record_dir
        self.accounts = Accounts(settings.budget_bytes)
        self.pools = Pools(gpu)
        self.awake = False
        self.uuid = ""  # of the device, once it is known
        self._statistics: Any = None  # of the last check
        self._flushes = 0  # of the allocator, up to the last step's end
        self._footprint = self._reserved_peak = 0  # bytes, since the session began
        self._noted: Any = None  # statistics at its last update
        self._first: Any = None  # statistics at the session's start
        self.fragmented = 0
        self._looked_at_holes = 0.0
        self._ask_again = self._refresh_again = 0.0  # not before this time
        self._patience = ASK_SECONDS
        self._has_loaded = False  # since the last reading
        self._is_heard = False  # whether the allocator was asked to call us has been checked
        self._last_step_ended = float("-inf")  # in seconds

    # -- called by the session -------------------------------------------------------------------

    def connect(
        self, dtr: DTR, callbacks: Callbacks, warn: Callable[[str], None], alert: Callable[[str], None]
    ) -> None:
        """Connect to a session."""
        storage.use_device(storage.CUDA_ROUNDING)
        self._connect(dtr, callbacks, alert)
        self.operators.connect(callbacks, self, warn)
        self._captures = Captures(self, warn)
        dtr.eviction.refresh = self.refresh

    def _connect(self, dtr: DTR, callbacks: Callbacks, alert: Callable[[str], None]) -> None:
        self.dtr, self.ledger, self.callbacks, self._alert = dtr, dtr.ledger, callbacks, alert
        self._retry = Retry(self.gpu, self.accounts, self.pools, dtr, callbacks, alert)

    @property
    def present(self) -> Cuda:
        """The part of the device in use."""
        return self.parts[self.ledger.device]

    @property
    def retry(self) -> Retry:
        """That of the device in use."""
        return self.present._retry

    def _join(self, index: int) -> bool:
        """Let the session use another GPU, too. Returns whether it does."""
        if self._index is not None or self.operators.blind:
            return False
        one = Cuda(type(self.gpu)(), self._settings, index)
        one.parts, one.place, one.operators = self.parts, len(self.parts), self.operators
        one._connect(self.dtr, self.callbacks, self._alert)
        one._native = self._native
        one._retry.use(self._native, one.place)
        one._retry.observers = self._retry.observers
        one.accounts.set_budget(self.accounts.budget_bytes)
        one.gpu.follows = False
        try:
            one.gpu.bind(index)
            one._began()
        except RuntimeError:
            return False
        self.parts.append(one)
        self._native.bind(index)
        self._avoid_flushes()
        self.callbacks.reasons.add("several GPUs")  # each has its own thread of the autograd engine
        storage.use_device(storage.CUDA_ROUNDING, *(part.gpu.index for part in self.parts), joins=self._join)
        with self.ledger.on(one.place):
            self.ledger.set_limit(UNLIMITED if self.ledger.budget_bytes is None else self.ledger.budget_bytes)
            self._prepare_fingerprints()
            one._look()
        return True

    def _began(self) -> None:
        self.uuid = self.gpu.uuid()
        self._noted = self._first = before = self.gpu.statistics()
        self._retry.began(before.ooms)
        self._flushes = before.flushes
        self.awake = True

    def _current(self) -> Cuda:
        """Return the part of the device that is current in this thread."""
        return next((part for part in self.parts if part.gpu.is_current()), self)

    def _relieve(self, nbytes: int, attempt: int) -> bool | None:
        part = self._current()
        with self.ledger.on(part.place):
            return part._retry.relieve(nbytes, attempt)

    def make_interposer(self, native: ModuleType, callbacks: Callbacks, *told: Any) -> CudaInterposer:
        self._native = native
        self._retry.use(native, self.place)
        return CudaInterposer(native, callbacks, self, *told)

    def below(self) -> on_main_stream:
        """Return the context in which recorded operators are replayed."""
        return on_main_stream(self)

    def run_again(self, run: Callable[[], None], nbytes: int) -> None:
        """Call a function that allocates so many bytes, and has found no memory. Raises BudgetError."""
        self.retry.refused = nbytes
        self.retry.attempt(run, "a tensor that comes back from the host", nbytes)

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.operators.capturing

    def install(self) -> None:
        self._captures.install()
        self.gpu.install(self.look)
        self.pools.install(self.look)
        self._retry.observers.install()
        self._native.on_shortage(self._relieve)
        self._avoid_flushes()

    def _avoid_flushes(self) -> None:
        limited = self.accounts.budget_bytes is not None
        self._native.avoid_flushes([part._retry.flushes for part in self.parts] if limited else [])

    def remove(self) -> None:
        self._native.on_shortage(None)
        self._native.avoid_flushes([])
        self.gpu.leave_blocks(self._native)
        self._captures.remove()
        self._retry.observers.remove()
        self._lift()
        self.pools.remove()
        self.gpu.remove()
        storage.use_device(storage.CPU_ROUNDING)

    def _lift(self) -> None:
        if self.awake and not self.operators.blind and self.usable():
            for part in self.parts:
                part.gpu.set_cap(None)

    def refused(self, error: BaseException) -> None:
        self.retry.met(error)

    def usable(self) -> bool:
        return bool(self.gpu.usable())

    def concerned(self, args: Any, kwargs: Any) -> bool:
        """Return whether an operator uses a GPU. Wakes the session if it is the first one."""
        touched = self.gpu.touched_by(args, kwargs)
        if touched is None:
            return False
        if not self.awake:
            if touched.type != self.type or not self.gpu.initialized():
                return False
            self.wake(touched)
        return True

    def wake(self, device: Any) -> None:
        """Start: an operator is about to use a GPU for the first time, `device` or the current one."""
        with self.callbacks.lock:
            if self.awake:
                return
            self.gpu.bind(device.index if self._index is None else self._index)
            storage.use_device(storage.CUDA_ROUNDING, self.gpu.index, joins=self._join)
            try:
                self._began()
                self.operators.blind = not self._first.total and NO_CACHING in os.environ
            except RuntimeError:
                self.operators.blind = True
            if self.operators.blind:
                self._alert(BLIND)
            self.awake = True
            settle_at_exit()
            self._prepare_fingerprints()
            self.look()

    def set_budget(self, budget_bytes: int | None) -> None:
        if budget_bytes is None:
            self._lift()
        for part in self.parts:
            part.accounts.set_budget(budget_bytes)
        self._avoid_flushes()
        self._prepare_fingerprints()
        self.look()

    def _prepare_fingerprints(self) -> None:
        """Allocate what `--verify` takes before anything has to be evicted. The next look counts it."""
        fingerprints = self.ledger.fingerprints
        if fingerprints is None or self.accounts.budget_bytes is None:
            return
        if self.awake and self.usable():
            for part in self.parts:
                fingerprints.prepare(part.gpu.index)

    def _step_ended(self) -> None:
        flushes = self._flushes
        if self.awake and not self.operators.blind and self.usable():
            found = self.gpu.statistics()
            self._flushes = found.flushes
            self.gpu.check_blocks(self._native, found.reserved)
        unused = self._retry.flushes.take_unused()
        self.accounts.step_ended(self._flushes > flushes and not self.gpu.follows, unused)
        self._last_step_ended = monotonic()

    def step_ended(self) -> None:
        for part in self.parts:
            part._step_ended()
        if self.awake and not self.capturing:
            self._native.read_times()
        if self.awake and not self.capturing and monotonic() - self._looked_at_holes > LOOK_AT_HOLES_SECONDS:
            self._looked_at_holes = monotonic()
            self.fragmented = fragmented_bytes(self.gpu.segments(UNLIMITED))
        self.look()

    def ended(self, steps: int) -> None:
        """Note that the process ends after this many steps."""
        if not self.awake and steps:
            self._alert(NEVER_USED)

    def counters(self) -> dict[str, int]:
        found = self._statistics
        return {
            "reserved_bytes": found.reserved if found else 0,
            "reserved_peak_bytes": self._reserved_peak,
            "overhead_bytes": self.accounts.overhead,
            "footprint_peak_bytes": self._footprint,
            "guard_bytes": self.accounts.guard,
            "cap_bytes": self.accounts.cap or 0,
            "device_index": self.gpu.index,
            "oom_retries": self._retry.retries,
            "fragmented_bytes": self.fragmented,
        }

    def others(self) -> list[dict[str, int]]:
        """Return the figures of the GPUs that the program uses besides the first."""
        found = []
        for part in self.parts[1:]:
            with self.ledger.on(part.place):
                tensors = {name: getattr(self.ledger, name) for name in OF_TENSORS}
            found.append(tensors | part.counters())
        return found

    def waited_ns(self) -> int:
        """Return how long the allocator's flushes have taken so far, in ns.

        An estimate, for which all that the allocator has returned to the driver is mapped again.
        """
        return sum(part._waited_ns() for part in self.parts)

    def _waited_ns(self) -> int:
        if self._first is None or not self.usable():
            return 0
        found = self.gpu.statistics()
        flushes, unmapped = found.flushes - self._first.flushes, found.unmapped - self._first.unmapped
        both = max(unmapped, 0)
        return int(self._native.flush_ns(both, both, flushes)) if flushes > 0 else 0

    def avoiding_ns(self) -> int:
        """Return how long dtrrun has worked inside the program's operators to avoid flushes, in ns."""
        return sum(part._retry.flushes.avoiding_ns for part in self.parts)

    def sufficient_bytes(self, counters: Mapping[str, int]) -> int:
        """Return the budget in which nothing would have been evicted so far. counters: the session's."""
        return max(
            sufficient_budget(max(one["footprint_peak_bytes"], one["overhead_bytes"] + one["peak_bytes"]))
            for one in (counters, *self.others())
        )

    def most_bytes(self) -> int:
        """Return the largest budget that there is memory for, and that the program lets us use."""
        return min(part._most_bytes() for part in self.parts)

    def _most_bytes(self) -> int:
        accounts = self.accounts
        if not self.awake or not self.usable():
            return 0
        used, total = self.gpu.used_and_total()
        there: int = accounts.overhead + self.gpu.statistics().reserved + max(total - used, 0)
        allowed = accounts.programs_cap
        return there if allowed is None else min(there, allowed + accounts.overhead + accounts.guard)

    def pool_growth_bytes(self) -> int:
        """Return by how much the program's own pools may grow in a larger budget: what would not be evicted
        there stays with them."""
        return self.ledger.evicted_bytes if self.present.accounts.stranded else 0

    def hint(self) -> str:
        """Return what limits the program besides the budget, or ""."""
        if self.capturing:
            return CAPTURING
        which = ONE_OF_SEVERAL.format(gpu=self.present.gpu.index) if len(self.parts) > 1 else ""
        limit = PROGRAMS_LIMIT if self.present.accounts.forbidden else ""
        return ". ".join(filter(None, (which, limit)))

    # -- the budget ------------------------------------------------------------------------------

    def _loaded(self) -> None:
        """Measure after an operator's first run, which may have loaded kernels or a library."""
        for part in self.parts:
            part._has_loaded = True
        self.look()

    def look(self, *, settles: bool = True) -> None:
        """Measure the devices' memory use; see `_look`."""
        for part in self.parts:
            with self.ledger.on(part.place):
                part._look(settles=settles)

    def _look(self, *, settles: bool = True) -> None:
        """Measure the device's memory use; set the allocator's cap and the ledger's limit. It is in use.

        Steps only repeat if both stand still in between. So during a step they only fall, and only if
        libraries have taken more. settles: let them follow all of the measurements, as at a step's end.
        """
        if not self.awake or self.capturing or self.operators.blind or not self.usable():
            return
        with self.callbacks.lock:
            ledger, accounts = self.ledger, self.accounts
            ledger.collect_dead()
            self._statistics = found = self.gpu.statistics()
            if not self._is_heard and found.total > self._first.total:
                self._is_heard = True
                self._tell_what_is_unheard()
            if not self.callbacks.others_run() and self._retry.unseen(found.ooms):
                self._retry.did_without()  # otherwise their errors may be on the way
            used, _ = self.gpu.used_and_total()
            now = monotonic()
            shown = self._shown(found.reserved, used, now)
            if self.gpu.statistics().reserved != found.reserved:
                return  # another thread's operator changed it, so the figures don't match; check again soon
            before = accounts.cap
            stands = self.gpu.cap_stands()
            accounts.programs_cap = self.gpu.programs_cap()
            settles = settles or self._has_loaded or not stands or now - self._last_step_ended > STEPS_SECONDS
            accounts.look(found.reserved, used, shown, now, loaded=self._has_loaded)
            self._has_loaded = False
            self._note_footprint(found)
            if accounts.cap is None:
                return
            if not settles and before is not None and accounts.cap >= before:
                accounts.cap = before
                return
            if not self._retry.lifted and (accounts.cap != before or not stands):
                self.gpu.set_cap(accounts.cap)
                ledger.overhead = {CONTEXT: accounts.overhead, GUARD: accounts.guard}
                if accounts.forbidden:
                    ledger.overhead[FORBIDDEN] = accounts.forbidden
            self._limit(found)

    def _tell_what_is_unheard(self) -> None:
        for what, so in self.gpu.unheard(self._native):
            lack(what, so)
        for line in lacked():
            self._alert(line)

    def _note_footprint(self, found: Any) -> None:
        """Update the peaks of reserved memory, and of overhead plus reserved memory, since the last reading.

        What was loaded in the meantime may already have been there at the peak of reserved memory. The
        allocator's own peak may be from before the session.
        """
        before, self._noted = self._noted, found
        reserved = found.reserved_peak
        if before.reserved_peak == reserved:
            reserved = max(before.reserved, found.reserved)
        self._reserved_peak = max(self._reserved_peak, reserved)
        self._footprint = max(self._footprint, self.accounts.overhead + reserved)

    def _shown(self, reserved: int, used: int, now: float) -> tuple[int, float] | None:
        """Return the bytes that the driver shows for this process, read by the launcher or directly, and when
        they were read."""
        told = self._told()
        if told is not None and told[1] >= self.accounts.still_since(reserved, now):
            return told
        if now >= self._ask_again or self.accounts.doubtful(reserved, used):
            self._ask_again = now + ASK_SECONDS
            nbytes = self.gpu.shown()
            if nbytes is not None and nbytes > reserved:  # a context takes some, so less is not ours
                return nbytes, now
        return None

    def _told(self) -> tuple[int, float] | None:
        if self._record_dir is None or self.place:  # the launcher watches the first device
            return None
        return driver_bytes(self._record_dir)

    def refresh(self) -> bool:
        """Measure the device in use again; see `_refresh`."""
        return self.present._refresh()

    def _refresh(self) -> bool:
        """Measure again before the program is refused memory. Returns whether tensors may now take more.

        Since the driver's last figure, other processes' memory may have been counted as ours, and taken as a
        sign of further growth. If nothing is gained, do not measure again for a while.
        """
        start = monotonic()
        if not self.awake or start < self._refresh_again:
            return False
        before = self.ledger.limit
        self.accounts.forget_growth()
        self._ask_again = start
        self._look()
        if self.accounts.figured < start and self._told() is not None:
            while (told := self._told()) and told[1] < start and monotonic() < start + WAIT_SECONDS:
                sleep(WAIT_SECONDS / 100)
            self._look()
        if self.accounts.figured < start and (nbytes := self.accounts.disown()):
            self._alert(OTHERS.format(size=format_size(nbytes)))
            self._look()
        gained = bool(self.ledger.limit > before)
        self._patience = ASK_SECONDS if gained else min(2 * self._patience, 60 * ASK_SECONDS)
        self._refresh_again = monotonic() + self._patience
        return gained

    def _limit(self, found: Any) -> None:
        ledger, cap = self.ledger, self.accounts.cap
        if ledger.budget_bytes is None or not ledger.evicting:
            return
        ledger.overhead[WORKSPACES] = max(found.allocated - ledger.resident_bytes, 0)
        self.accounts.stranded = stranded = self.pools.stranded_bytes()
        ledger.overhead.pop(POOLS, None)
        if stranded:
            ledger.overhead[POOLS] = stranded
        ledger.set_limit(self.accounts.limit(found.allocated, ledger.resident_bytes))
        self.dtr.eviction.reach = ledger.limit + self.accounts.slack
        if ledger.resident_bytes > ledger.limit:
            with (guard := below()), guard:  # what can't be evicted is left to the operators
                self.dtr.eviction.release(ledger.resident_bytes - ledger.limit)
        # A single request can exceed the cap by up to a page less one byte, which the guard covers.
        if cap is not None and found.reserved > cap + SEGMENT:
            self.gpu.empty_cache()


def driver_bytes(record_dir: str) -> tuple[int, float] | None:
    """Return the driver's figure for this process as last read by the launcher, and when (s, monotonic)."""
    figure = driver.read_figure(record_dir, os.getpid())
    if figure is None or figure.source not in driver.PER_PROCESS:
        return None
    return figure.nbytes, figure.monotonic_ns / 1e9
