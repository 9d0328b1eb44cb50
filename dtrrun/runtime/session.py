"""One session: the mode, the ledger and everything patched for them, switched on and off together."""

from __future__ import annotations

import os
import sys
import threading
import warnings as python_warnings
from contextlib import suppress
from time import perf_counter_ns as now_ns
from typing import Any
from zlib import crc32

import torch

from dtrrun.policy import make_policy
from dtrrun.runtime import compiler, fork, notices, optional, publish, shapes, threads
from dtrrun.runtime import device as devices
from dtrrun.runtime.access import Access
from dtrrun.runtime.backwards import Backwards
from dtrrun.runtime.careful import Careful
from dtrrun.runtime.collector import Collector
from dtrrun.runtime.composites import Composites
from dtrrun.runtime.costs import read_costs
from dtrrun.runtime.dispatch_cost import dispatch_cost
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.escapes import Escapes
from dtrrun.runtime.functions import Functions
from dtrrun.runtime.gradients import Gradients
from dtrrun.runtime.guards import below
from dtrrun.runtime.heap import Heap
from dtrrun.runtime.launcher import Launcher
from dtrrun.runtime.ledger import Ledger
from dtrrun.runtime.mode import DTRMode
from dtrrun.runtime.mode_checks import ModeChecks
from dtrrun.runtime.reducers import Reducers
from dtrrun.runtime.replay import Replay
from dtrrun.runtime.resizes import Resizes
from dtrrun.runtime.scripts import Scripts
from dtrrun.runtime.steps import StepClock
from dtrrun.runtime.thrashing import GRACE_NS, Thrashing
from dtrrun.runtime.training_memory import training_memory
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import as_bytes
from dtrrun.telemetry.advice import FOR_A_BLOCK, FOR_A_COMMAND

modes_around = torch._C._len_torch_dispatch_stack

PUBLISH_NS = 200_000_000  # between two writes of the record
COMPACT_EVERY = 20_000  # operators
LEARNING = 2  # steps after which costs are measured once more


class Session:
    """Keeps this process's tensors inside a budget from `start` until `stop`."""

    def __init__(self, settings: RuntimeSettings) -> None:
        if settings.deallocation != "eager":
            raise ValueError(
                f"deallocation {settings.deallocation!r} exists in the simulator only; use eager"
            )
        self.settings = settings
        policy = make_policy(
            settings.heuristic,
            seed=settings.seed,
            sample=settings.sample,
            ignore_small=settings.ignore_small,
        )
        self.device = devices.choose(settings)
        parts: tuple[Any, Any, Any, Any] = (Ledger, Careful, Access, None)
        if settings.log is not None:
            from dtrrun.runtime.recording_parts import recording

            parts = recording(settings)
        new_ledger, new_careful, new_access, self._recorder = parts
        self.ledger: Ledger = new_ledger(
            settings.budget_bytes,
            policy,
            device_type=self.device.type,
            warn_only=settings.over_budget == "warn",
        )
        self.ledger.fingerprints = optional.fingerprints(settings)
        self.replay = Replay(self.ledger)
        self.ledger.rematerialize = self.replay.materialize
        self.careful: Careful = new_careful(
            self.ledger,
            self.replay,
            self._tick,
            self._met_leaf,
            self._too_small,
            modelled=settings.cost == "model",
        )
        self.replay.tick = self._tick
        if settings.verify:
            self.careful.take_all("verify")  # it keeps more about each output than the short cut does
        self._where = optional.where(settings, self.careful, self.replay)
        self._lookahead = optional.lookahead(self.careful)
        self.warnings: dict[str, int] = {}
        self.mode: DTRMode = self.device.make_mode(self)
        if settings.costs is not None and settings.cost == "measured":
            self.careful.costs = read_costs(settings.costs, self.device.type, self.warn)
        self.error: dict[str, Any] | None = None
        self.running = False
        self._started_ns = now_ns()
        self._loading_ns = shapes.loading_ns
        self._measuring_ns = 0
        self._compacted_age = 0
        self._thrashing = Thrashing(settings, self.warn, self._publish)
        self.steps = StepClock(lambda: publish.totals(self), self._step_ended)
        self._access: Access = new_access(self.careful)
        self._gradients = Gradients(self._access.pin)
        devices_of_operators = {"cpu", self.device.type}
        self._composites = Composites(self._access.reach, *(kind.upper() for kind in devices_of_operators))
        self.careful.kernels = self._composites.kernels
        self._notices = notices.Notices(self.warn)
        self._launcher = Launcher(settings.record_dir)
        self.ledger.met_device = self._met_device
        self._threads = threads.Threads(self.mode, self._threaded, self.warn)
        self._parts: list[Any] = [
            Escapes(self._access.reach),
            self._composites,
            Resizes(self.careful),
            self._gradients,
            Functions(self._access.lock),
            ModeChecks(self._access.lock, self.mode, lambda: self.careful.checks_modes),
            Backwards(self._no_optimizer, self._access.pin, self._met_leaf, self._backward_ended),
            Reducers(self.careful.watch_new),
            Scripts(),
            self._threads,
            # These see the end of a step before it may be the program's.
            *optional.training_state(settings, self._access.hold),
            *optional.tracing(settings, self.ledger, self.replay, self._where),
            self.steps,
            compiler.CompileNotice(self._warn_once_a_run),
            self._notices,
            Collector(),
            self.device,
        ]
        if self._where is not None:
            self._parts.append(self._where)
        if self.device.type == "cpu":  # without a budget, too: the times of the two are compared
            self.ledger.heap = Heap(settings.return_memory)
            self._parts.append(self.ledger.heap)
        self.writer: Any = None
        self._pid = os.getpid()

    # -- on and off ------------------------------------------------------------------------------

    def start(self, writer: Any = None) -> None:
        self.writer = writer
        for part in self._parts:
            part.install()
        fork.watch(self._before_fork, self._after_fork_in_parent, self._after_fork_in_child)
        self.careful.met_thread = self._threaded
        if threading.current_thread() is threading.main_thread():
            self.careful.home = threading.get_ident()
        self.running = True
        if modes_around():
            self.careful.under_modes = True
            self.careful.take_all("modes of the program's")
            self.warn(notices.UNDER_MODES)
        if self._recorder is not None:
            self._recorder.step_begins(self.ledger)
        self._threads.begin()
        self._publish()

    def stop(self) -> None:
        """Bring everything reachable back and leave PyTorch as it was."""
        if not self.running:
            return
        self.running = False
        self._threads.end()
        fork.unwatch()
        try:
            self.ledger.small_constants.clear()
            self.ledger.drain()
            self.ledger.set_budget(None)
            self.device.set_budget(None)
            lost = self.ledger.restore_all() if self.device.usable() else None
            if lost:
                self.warn(f"{len(lost)} storages could not be brought back at the session's end")
        finally:
            if self._recorder is not None:
                self._recorder.abandon()
            for part in reversed(self._parts):
                part.remove()
        self.measure_at_the_end()
        self._publish()

    def set_budget(self, size: int | str | None) -> None:
        """Change the budget of a running session; evicts at once what no longer fits.

        size: as of `budget`. Raises ValueError for another one, BudgetError if it cannot hold what stays.
        """
        budget_bytes = as_bytes(size)
        with self.careful.lock:
            self.ledger.set_budget(budget_bytes)
            self.device.set_budget(budget_bytes)
            self.careful.forget_signatures()  # they know no output sizes if there was no budget before
            try:
                with (guard := below()), guard:
                    self.ledger.make_room(0, "set_budget")
            except BudgetError as error:
                self._too_small(error)
                raise

    # -- what the parts call ---------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's storage in memory from now on: for native code that reads it unseen."""
        self._access.pin(tensor, "pinned")

    def _met_leaf(self, leaf: torch.Tensor) -> None:
        self._gradients.watch(leaf)

    def _met_device(self, kind: str) -> None:
        if kind.startswith("cuda:"):
            self.careful.take_all("several GPUs")  # each has a thread of the autograd engine's
        if kind != "cpu" or self.device.type == "cpu":  # beside a GPU it is no surprise
            self.warn(notices.OTHER_DEVICE.format(device=kind, ours=self.ledger.device_type))

    def _threaded(self) -> None:
        """This thread is about to touch what the session keeps: may the short cut be taken any longer?"""
        with self.careful.lock:
            if self.careful.home is None:
                self.careful.home = threading.get_ident()
        if self.careful.home == threading.get_ident():
            return
        self.careful.take_all("threads")
        threads.wait_outside(DTRMode.dispatch.__code__, Careful.run.__code__)

    def warn(self, text: str) -> None:
        """One line for the user, once; counted if it comes again."""
        new = text not in self.warnings
        self.warnings[text] = self.warnings.get(text, 0) + 1
        if new:
            print(f"dtrrun: warning: {text}", file=sys.stderr, flush=True)

    def _warn_once_a_run(self, text: str) -> None:
        """The same, printed by the first process of a run alone: it is true of all of them alike."""
        folder = self.settings.record_dir
        if folder is not None and text not in self.warnings:
            try:
                path = os.path.join(folder, f"said-{crc32(text.encode()):08x}")
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                self.warnings[text] = 0
            except OSError:
                pass  # the folder has gone, or the disk is full
        self.warn(text)

    def _too_small(self, error: BudgetError) -> None:
        """The program is about to see `error`."""
        how = FOR_A_BLOCK if self.writer is None else FOR_A_COMMAND
        error.explain(training_memory(self.ledger.device_type), how)
        self._notices.budget_error = str(error)
        self.error = {
            "operator": error.operator,
            "needed_bytes": error.needed_bytes,
            "pinned": error.pinned,
            "least_budget_bytes": error.least_budget_bytes,
            "called": error.called,
            "called_bytes": error.called_bytes,
            "training": error.training,
        }

    # -- time ------------------------------------------------------------------------------------

    def times(self) -> dict[str, int]:
        """Nanoseconds since the session's start, by what they were spent on."""
        policy = self.ledger.policy
        return {
            "wall_ns": now_ns() - self._started_ns,
            "operators_ns": self.mode.operators_ns,
            "rematerialization_ns": self.replay.operators_ns,
            "scoring_ns": policy.scoring_ns,
            "search_ns": policy.search_ns,
            "bookkeeping_ns": self.mode.bookkeeping_ns
            + self.ledger.making_room_ns
            + self.replay.under_way_ns()
            - policy.scoring_ns
            - policy.search_ns
            - (shapes.loading_ns - self._loading_ns)  # an import, not work on a step
            + self._measuring_ns,
            "dispatch_ns": dispatch_cost.of(self.ledger.age) if self.device.type == "cpu" else 0,
        }

    def measure_at_the_end(self) -> None:
        """The same for a program that has made no steps."""
        if self.device.type == "cpu" and not self.steps.count:
            self._measuring_ns += dispatch_cost.program_ended(self.ledger.age)

    def _measure_dispatch(self) -> None:
        """After a step: measure what the other times do not show, outside of the steps' own times."""
        if self.device.type == "cpu":  # on a GPU, whose kernels go on meanwhile, it is no slowdown
            spent = dispatch_cost.step_ended(self.steps.count)
            if spent:
                self._measuring_ns += spent
                self.steps.leave_out()

    def _tick(self) -> None:
        """Called now and then, by the mode and in replays; sets when to be called again."""
        # Not within a replay: compaction may replay in turn, which would tick again.
        if self.ledger.age - self._compacted_age > COMPACT_EVERY and not self.ledger.replaying:
            self._compact()
        self._notices.look_for_modules()
        self._threads.look()
        self.device.look()
        self._launcher.look()
        self._publish()
        self.careful.next_tick = self.replay.next_tick = now_ns() + PUBLISH_NS
        self._thrashing.watch(self.steps.under_way(), GRACE_NS)

    def _publish(self) -> None:
        if self.writer is not None and os.getpid() == self._pid:
            with suppress(OSError, ValueError):
                publish.write(self, self.writer)

    def _compact(self) -> None:
        with self.careful.lock:
            self.ledger.drain()
            self.ledger.compact(self._compacted_age)
            self._compacted_age = self.ledger.age

    def _no_optimizer(self) -> bool:
        return not (self.steps.count or self._gradients.optimizers)

    def _backward_ended(self) -> None:
        """In a program without an optimizer this is the sign of a step."""
        with self.careful.lock:
            self.ledger.end_period()

    def _step_ended(self) -> None:
        with self.careful.lock:
            self.ledger.end_step()
            for part in (self._lookahead, self._where):
                if part is not None:
                    part.step_ended()
            if self.steps.last is not None:
                self.steps.last["peak_bytes"] = self.ledger.step_peak_bytes
            self.ledger.step_peak_bytes = self.ledger.resident_bytes
            self.device.step_ended()
        assert self.steps.last is not None
        self._thrashing.watch(self.steps.last)
        if self.steps.count <= LEARNING:
            self.careful.measure_again()
        self._measure_dispatch()
        if self.settings.max_steps is not None and self.steps.count >= self.settings.max_steps:
            self._publish()
            raise SystemExit(0)

    # -- fork ------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        """The child inherits our memory, but not our threads: what fits into the budget comes back first.

        No other thread may be in the middle of something that the child would then have half of.
        """
        self._lock_of_fork = self.careful.lock
        self._lock_of_fork.acquire()
        if self.running and self.device.type == "cpu":  # a forked child can't use its parent's CUDA
            with suppress(torch.OutOfMemoryError):
                self.ledger.restore_all()

    def _after_fork_in_parent(self) -> None:
        self._lock_of_fork.release()

    def _after_fork_in_child(self) -> None:
        if not self.running:
            return
        if self.writer is not None:
            self.writer.forked()
            self.writer = None
        self.careful.lock = threading.RLock()
        python_warnings.filterwarnings("ignore", message=".*dtrrun.*")
        self.stop()
        notices.warn_when_it_trains(lambda: not fork.is_watched())

    # -- report ----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The counters of `telemetry.fields`, and the record's tables: of `operators` it has the table."""
        with self.careful.lock:
            self.ledger.drain()
            return publish.counters(self) | publish.tables(self)
