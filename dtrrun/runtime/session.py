"""One session: the interposer, the ledger and all patches, switched on and off together."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings as python_warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from time import perf_counter_ns as now_ns
from typing import Any
from zlib import crc32

import torch

from dtrrun.bindings import graph_of
from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Signature, Version
from dtrrun.core.heuristics import AUTO, STEADY
from dtrrun.core.ledger import GIVEN_UP, beside_tensors
from dtrrun.runtime import device as devices
from dtrrun.runtime import optional, shapes, storage, tracebacks
from dtrrun.runtime.access import Access
from dtrrun.runtime.compiled.remedy import IN_A_BLOCK, IN_A_COMMAND, remedy
from dtrrun.runtime.costs import UNKNOWN, read_costs
from dtrrun.runtime.dispatch import native
from dtrrun.runtime.dispatch.callbacks import Callbacks, Own
from dtrrun.runtime.dispatch.signatures import Signatures
from dtrrun.runtime.dispatch.turns import lock_of_session
from dtrrun.runtime.errors import Advice, BudgetError
from dtrrun.runtime.execute import Executor
from dtrrun.runtime.guards import below, interposed
from dtrrun.runtime.heap import Heap
from dtrrun.runtime.host import Host
from dtrrun.runtime.launcher import Launcher
from dtrrun.runtime.nodes import Nodes
from dtrrun.runtime.observe import notices, publish
from dtrrun.runtime.observe.ending import end_script
from dtrrun.runtime.observe.expected import Plain, Refused, advised_budget, growth_of
from dtrrun.runtime.observe.hints import hint, unnamed
from dtrrun.runtime.observe.holders import LONGEST_NS
from dtrrun.runtime.observe.holding import Now, Program, by_name, hold, told
from dtrrun.runtime.observe.labels import Labels, Row, held_by, relabelled, without_role_bytes
from dtrrun.runtime.observe.moment import Moment
from dtrrun.runtime.observe.on_step import Figures, OnStep
from dtrrun.runtime.observe.own_time import OwnTime, processor_wait, unseen_ns
from dtrrun.runtime.observe.rehearsal import Rehearsal
from dtrrun.runtime.observe.steps import StepClock
from dtrrun.runtime.observe.thrashing import GRACE_NS, Thrashing
from dtrrun.runtime.observe.training_memory import find_training
from dtrrun.runtime.outside import Outside
from dtrrun.runtime.patches import fork, registry
from dtrrun.runtime.patches.backwards import Backwards
from dtrrun.runtime.patches.checkpointing import Checkpointing
from dtrrun.runtime.patches.composites import Composites
from dtrrun.runtime.patches.escapes import Escapes
from dtrrun.runtime.patches.exports import Exports
from dtrrun.runtime.patches.extension_functions import ExtensionFunctions
from dtrrun.runtime.patches.foreign_composites import ForeignComposites
from dtrrun.runtime.patches.functions import Functions
from dtrrun.runtime.patches.gathered import Gathered
from dtrrun.runtime.patches.gradients import Gradients
from dtrrun.runtime.patches.libraries import Libraries
from dtrrun.runtime.patches.reducers import Reducers
from dtrrun.runtime.patches.resizes import Resizes
from dtrrun.runtime.patches.scripts import Scripts
from dtrrun.runtime.patches.seeds import Seeds
from dtrrun.runtime.patches.workers import Workers
from dtrrun.runtime.pending import soon
from dtrrun.runtime.shortage import Shortage
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import as_bytes, format_size, format_size_up
from dtrrun.telemetry.advice import FOR_A_BLOCK, FOR_A_COMMAND, Advised

PUBLISH_NS = 200_000_000  # between two writes of the record
LEFT_NS = 10_000_000  # between two looks whether a session that has been left is over
COMPACT_EVERY = 20_000  # operators
LEARNING = 2  # steps; after each of them, costs are measured once more
NAMED = 0.1
"""The share of the budget from which the last table names what holds memory whose role is not known."""
UNCOLLECTED = (
    "gc.disable() is respected, so what only reference cycles hold stays in memory until the program calls "
    "gc.collect()"
)
EXCEEDED = (
    "the budget of {budget} is exceeded{excess}, because nothing was left to evict "
    "(--over-budget {how}){rest}"
)
ADAPTED = ": what must stay and {operator} together take {limit}, which is the limit from now on"
BROUGHT_BACK = (
    "at the end of the block, what the program still has takes {resident}, which is {excess} above the budget"
)
GAVE_UP = (
    "{count} storages ({size}) were evicted when an earlier block ended by an error, and are given up as "
    "another block begins: tensors over them have no data any more. The program still keeps the error, or "
    "what it refers to; `traceback.clear_frames(error.__traceback__)` releases that"
)
NEWS = 8  # it is said again once the excess has grown by an eighth


class Session:
    """Keeps this process's tensors inside a budget from `start` until `stop`."""

    def __init__(self, settings: RuntimeSettings) -> None:
        if settings.deallocation != "eager":
            raise ValueError(
                f"deallocation {settings.deallocation!r} exists in the simulator only; use eager"
            )
        self.settings = settings
        self.warnings: dict[str, int] = {}
        self.error: dict[str, Any] | None = None
        self._final: dict[str, Any] | None = None  # the report, once the session has been left
        self.ended_with: dict[str, int] = {}  # the counters of what was limited, once the budget is lifted
        self._said_exceeded = "", 0  # the latest warning that the budget is exceeded, and by how many bytes
        self.running = False
        self.ending = False  # the process ends, and the figures are published for the last time
        self.device = devices.choose(settings)
        self._recorder = optional.recorder(settings)
        self.fingerprints = optional.fingerprints(settings, self.device.refused)
        self._native = native.load(settings)
        storage.use_extension(self._native)
        self._lock = lock_of_session(self._native, self.alert)
        self._operator_ended = threading.Condition(self._lock)
        self._heap = self._make_heap()
        executor = Executor(self.device.memory, self.device, self._between_replays)
        self.dtr = DTR(
            native.policy(self._native, settings),
            graph_of(self._native),
            self.device.memory,
            executor,
            budget_bytes=settings.budget_bytes,
            budget_error=BudgetError,
            out_of_memory=torch.OutOfMemoryError,
            device_type=self.device.type,
            warn_only=settings.over_budget in ("warn", "evict"),
            adapts=settings.over_budget == "warn",
            fingerprints=self.fingerprints,
            heap=self._heap,  # also without a budget, so that times with and without one are comparable
            collect_garbage=self._collect_garbage,
            modelled=settings.cost == "model",
            met_device=self._met_device,
            room_given_back=lambda: self.callbacks.tell_waiting(),
        )
        self.ledger = self.dtr.ledger
        self.ledger.lock = self._lock
        known = UNKNOWN
        if settings.costs is not None and settings.cost == "measured":
            known = read_costs(settings.costs, self.device.type, self.warn)
        self.host = Host(self.dtr, settings, self._native, self.warn, known.host)
        kernels: dict[Any, Any] = {}
        self.callbacks = Callbacks(
            self.dtr,
            Signatures(
                self.ledger,
                self.device.operators,
                costs=known.costs,
                modelled=settings.cost == "model",
                asks_sizes=self._recorder is not None,
            ),
            self._lock,
            self._operator_ended,
            device=self.device.operators,
            kernels=kernels,
            tick=self._tick,
            met_leaf=self._met_leaf,
            met_thread=self._threaded,
            too_small=self._too_small,
            alert=self.alert,
            native=self._native,
        )
        self.device.connect(self.dtr, self.callbacks, self.warn, self.alert)
        self._callers = optional.callers(settings, self.callbacks, self._native)
        self.interposer = self.device.make_interposer(
            self._native, self.callbacks, self._threaded, self.alert
        )
        self.dtr.eviction.adopt_counted = self.interposer.adopt_counted
        self._started_ns = now_ns()
        self._waits, self._own_time = processor_wait(), OwnTime(5)
        self._waited_ns = self._waits.ns()
        self._loading_ns = shapes.loading_ns
        self._compacted_age = 0
        self._thrashing = Thrashing(settings, self.warn, self.alert, self._publish, self._remedy)
        self._labels = Labels(self.ledger)
        self.steps = StepClock(
            lambda: publish.totals(self),
            self._step_ended,
            self._labels.stepped,
            self._own_work,
            self._end_if_enough,
            self._lock,
        )
        self._access = Access(self.callbacks)
        self.interposer.touch = self._access.touched
        own = self.callbacks.own
        self._gradients = Gradients(self._access.pin, self._access.keep_weight, self._native, own)
        self._notices = notices.Notices(self.warn, self.alert, lambda: self.ledger.most("evicted_bytes") > 0)
        self._checkpointing = Checkpointing(self._warn_once_a_run)
        self._launcher = Launcher(settings.record_dir)
        self.nodes = Nodes(settings.record_dir)
        self._where = optional.where(settings, self._callers, self.ledger)
        self._at_peak = optional.at_peak(settings, self, self._callers)
        self.adapting = self.dtr.eviction.adapting = optional.adapting(settings, self, self._advised)
        self.compiler = optional.compiler(settings, self._native, self._access, self._warn_once_a_run)
        self._lookahead = optional.lookahead(self.callbacks)
        if self._recorder is not None:
            self._recorder.connect(self.callbacks)
        backends = sorted({"CPU", self.device.type.upper()})
        composites = ForeignComposites(self.callbacks, self._native, kernels, backends)
        self._parts: list[Any] = [
            Escapes(self._access),
            Exports(self._access.reach, self._native),
            Composites(self._access.reach, kernels, backends),
            composites,
            ExtensionFunctions(self._native, composites),
            Libraries(self.callbacks),
            Resizes(self.callbacks),
            Gathered(self.callbacks),
            self._gradients,
            Functions(self._access.lock),
            Backwards(self._no_optimizer, self._access.pin, self._met_leaf, self._backward_ended, own),
            Reducers(self.callbacks),
            Scripts(),
            Seeds(self._lock),
            Workers(),
            self._checkpointing,
            self.interposer,
            # Before `steps`, whose callback may end the program.
            *optional.training_state(settings, self._access.hold),
            *optional.tracing(settings, self.ledger, self._where),
            self.steps,
            self.compiler,
            self._notices,
            self.device,
        ]
        self._learning = optional.learning(self, settings)
        self._ranks = optional.ranks(self, settings, self._learning)
        self._peak = optional.peak(settings, self.device.type)
        self._peak_of_steps = 0  # bytes: the plain peak when the last step ended
        self._held: deque[int] = deque(maxlen=4)  # bytes: what tensors would take when each last step ended
        optionals = (
            self._callers,
            self._where,
            self._at_peak,
            self._recorder,
            self._heap,
            *self._on_heap(),
            self._learning,
        )
        self._parts += [part for part in optionals if part is not None]
        self.writer: Any = None
        self._pid = os.getpid()
        self._group: dict[str, Any] | None = None

    def _make_heap(self) -> Heap | None:
        return Heap(self.settings.return_memory, self._native) if self.device.type == "cpu" else None

    def _on_heap(self) -> list[Any]:
        """Return the parts that the heap calls."""
        if self._heap is None:
            return []
        return [
            Outside(self.callbacks, self._native),
            Shortage(self.callbacks, self._native, self.warn, lambda: self.adapting),
        ]

    # -- start and stop --------------------------------------------------------------------------

    def start(self, writer: Any = None) -> None:
        self.writer = writer
        for part in self._parts:
            part.install()
        for line in registry.lacked():
            self.alert(line)
        fork.watch(self._before_fork, self._after_fork_in_parent, self._after_fork_in_child)
        if threading.current_thread() is threading.main_thread():
            self.callbacks.home_thread = threading.get_ident()
        self.host.open()
        self.nodes.start()
        self.running = True
        if self._recorder is not None:
            self._recorder.step_begins()
        self.interposer.begin()
        self._publish()

    def stop(self) -> None:
        """Bring back everything reachable and restore PyTorch."""
        self._stop(self._restore_all)

    def leave(self) -> None:
        """End the budget after an error in the program. Brings back what fits into the budget.

        The traceback refers to all that the failed code had, which may be many times the budget, and hardly
        ever does anybody read it. What does not fit stays evicted: the session goes on without a budget, and
        brings back what is read, until the rest has been released (`_look_whether_over`) or another session
        begins (`give_way`).
        """
        if not self._is_left():
            self.stop()

    def _is_left(self) -> bool:
        with self._lock:
            self.ledger.small_constants.clear()
            self.ledger.collect_dead()
            if not self.device.usable() or not self.dtr.rematerializer.restore_all(fitting=True):
                return False
            self._final = self._figures()
            self._lift_budget()
            self.stop_learning()
            self.callbacks.next_tick = 0
            return True

    @property
    def left(self) -> bool:
        """Whether the block has ended by an error, and something that it had evicted is still evicted."""
        return self.running and self._final is not None

    def give_way(self, budget_bytes: int | None) -> list[tuple[Any, int]]:
        """End a session that has been left, since another begins, with this budget.

        Returns the storages that are still evicted, and their bytes: they have no data any more, unless the
        new session has no budget. All of them were made by the code that has failed.
        """
        if gc.isenabled():
            gc.collect()  # an exception is often part of a cycle
        if budget_bytes is None:
            self.stop()
            return []
        self._stop(list)
        evicted = [one for one in self.ledger.versions.values() if one.alive and not one.resident]
        storages = [(storage, one.nbytes) for one in evicted if (storage := one()) is not None]
        if storages:
            size = format_size(sum(nbytes for _, nbytes in storages))
            self.alert(GAVE_UP.format(count=len(storages), size=size))
        return storages

    def take_over(self, storages: Sequence[tuple[Any, int]]) -> None:
        """Let operators that read these storages, which an earlier session has given up, raise LostError."""
        with self._lock:
            for storage, nbytes in storages:
                self.ledger.enter_given_up(storage, nbytes)

    def _lift_budget(self) -> None:
        """End the budget. The figures remain those that there were inside it."""
        if not self.ended_with:
            self.ended_with = publish.limited(self)
        self.ledger.set_budget(None)
        self.device.set_budget(None)

    def _restore_all(self) -> list[Version]:
        limit = self.ended_with["budget_bytes"] if self._final is None else -1
        with self._lock:
            peaks = [self.ledger.peak_bytes for _ in self.ledger.in_turn()]
            lost = self.dtr.rematerializer.restore_all()
            for device in self.ledger.in_turn():
                self.ledger.peak_bytes = peaks[device]  # that of the session's own time
            resident = self.ledger.most("resident_bytes")
        if 0 <= limit < resident and self._pid == os.getpid():
            excess = format_size_up(resident - limit)
            self.alert(BROUGHT_BACK.format(resident=format_size(resident), excess=excess))
        return [one for one in lost if one.pin != GIVEN_UP]

    def _look_whether_over(self) -> None:
        """Called by operators once the session has been left. Ends it soon if nothing is evicted any more."""
        self.callbacks.next_tick = now_ns() + LEFT_NS
        with self._lock:
            self.ledger.collect_dead()
            if self.ledger.most("evicted_bytes"):
                return
        soon(self._end_if_idle)  # not within an operator

    def _end_if_idle(self) -> None:
        if self.left and not self.ledger.most("evicted_bytes") and not tracebacks.is_beneath_us():
            self.stop()

    def _stop(self, restore: Callable[[], list[Version]]) -> None:
        """restore: brings evicted storages back, and returns those that it could not."""
        if not self.running:
            return
        self.running = False
        self._say_by_how_much()
        fork.unwatch()
        try:
            try:
                with self._lock:
                    self.ledger.small_constants.clear()
                    self.ledger.collect_dead()
                    self._lift_budget()
                lost = restore() if self.device.usable() else None
            finally:
                self.interposer.end()
            with self._lock:
                self._settle_fingerprints()
                self.dtr.recipes.end()
            if lost:
                self.alert(
                    f"{len(lost)} storages could not be brought back at the end of the session; tensors that "
                    "use them have no data"
                )
        finally:
            for part in reversed(self._parts):
                part.remove()
        self._publish()

    def _settle_fingerprints(self) -> None:
        if self.fingerprints is not None and self.device.usable() and not self.device.capturing:
            self.fingerprints.settle()

    def set_budget(self, size: int | str | None) -> None:
        """Change the budget of a running session, and evict at once what no longer fits.

        `size` is as in `budget`. Raises ValueError if it is invalid, and BudgetError if the memory that
        cannot be evicted does not fit.
        """
        budget_bytes = as_bytes(size)
        with self._lock:
            self.dtr.recipes.end_counting()
            self.ledger.set_budget(budget_bytes)
            self.device.set_budget(budget_bytes)
            self.callbacks.signatures.forget()  # those made without a budget lack result sizes
            with self.callbacks.telling(), (guard := below()), guard:
                self.dtr.eviction.make_room(0, "set_budget")

    def on_step(self, callback: Callable[[Figures], object]) -> None:
        """Call a function at the end of each optimizer step from now on, with a dict of its figures.

        These are `step` (counted from 1), `seconds`, `peak_bytes`, `evictions`, `rematerializations`,
        `rematerialization_seconds`, `host_copies` and `host_copied_bytes` (what has been copied to the
        host and back), and `budget_bytes`, unless there is no budget. The first step includes what ran
        before it. Exceptions of the function leave the optimizer's `step`.
        """
        self.steps.callbacks.append(OnStep(self, callback))

    def change_heuristic(self, name: str) -> None:
        """Switch to another eviction heuristic. Call it between operators.

        Raises ValueError if it is unknown or cannot be loaded.
        """
        policy = native.policy(self._native, self.settings, name)
        with self._lock:
            self.ledger.change_policy(policy)

    @property
    def rule(self) -> dict[str, Any] | None:
        """Facts about the current rule, if the session chooses it itself."""
        return None if self._learning is None else self._learning.rule

    # -- what the parts call ---------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's storage in memory from now on, for native code that dtrrun cannot see.

        If it is evicted, it is brought back first. Raises BudgetError if it does not fit.
        """
        self._access.pin(tensor, "pinned")

    def _met_leaf(self, leaf: torch.Tensor) -> None:
        self._gradients.watch(leaf)

    def _met_device(self, kind: str) -> None:
        if kind == "meta":  # has no memory: PyTorch and libraries use such tensors to infer shapes
            return
        if kind.startswith("cuda:"):
            self.callbacks.reasons.add("several GPUs")  # each has its own thread of the autograd engine
        if kind != "cpu" or self.device.type == "cpu":  # with a GPU session, CPU tensors are expected
            ours = "the CPU" if self.device.type == "cpu" else f"cuda:{self.device.gpu.index}"
            self.alert(notices.OTHER_DEVICE.format(device=kind, ours=ours))

    def _threaded(self) -> None:
        """This thread is about to access the session's tensors: it joins unless it has."""
        with self._lock:
            if self.callbacks.home_thread is None:
                self.callbacks.home_thread = threading.get_ident()
        if self.callbacks.home_thread == threading.get_ident():
            return
        self.callbacks.shared = True
        self.interposer.share(self.callbacks.reasons)

    def warn(self, text: str) -> None:
        """Show the user one line, once, unless `quiet`; repetitions are counted."""
        self._warn(text, shown=not self.settings.quiet)

    def alert(self, text: str) -> None:
        """Like `warn`, but even if `quiet`: results may differ, or the budget does not hold."""
        self._warn(text, shown=True)

    def _warn(self, text: str, *, shown: bool) -> None:
        new = text not in self.warnings
        self.warnings[text] = self.warnings.get(text, 0) + 1
        if new and shown:
            self.tell(f"warning: {text}")

    @staticmethod
    def tell(text: str) -> None:
        """Show the user one line, even if `quiet`. Unlike a warning, it is not in the report."""
        if sys.stderr is not None:
            with suppress(Exception):  # the program may have closed or replaced it
                print(f"dtrrun: {text}", file=sys.stderr, flush=True)

    def _warn_once_a_run(self, text: str) -> None:
        """Like `warn`, but only in the first process of a run, since it applies to all of them."""
        folder = self.settings.record_dir
        if folder is not None and text not in self.warnings:
            try:
                path = os.path.join(folder, f"said-{crc32(text.encode()):08x}")
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                self.warnings[text] = 0
            except OSError:
                pass  # the folder has been removed, or the disk is full
        self.warn(text)

    def _remedy(self, refused: str = "", tensors_bytes: int = 0) -> str:
        """Return what to do about a compiled program, or "" if it is none.

        refused: the operator that does not fit, if one did not, which reads and makes so many bytes.
        """
        called = (*self.interposer.native_calls, *self.interposer.python_calls)
        how = IN_A_COMMAND if self.writer is not None else IN_A_BLOCK
        return remedy(called, how, refused, tensors_bytes, self.ledger.limit)

    def _too_small(
        self, error: BudgetError, inputs: Sequence[Version] = (), failed: Signature | None = None
    ) -> None:
        """Explain `error`, which is about to be raised to the program. inputs, failed: the call's, if any."""
        if self._learning is not None:
            self._learning.forget()
        ledger, plain = self.ledger, self._plain(error, failed)
        error.keep_to(plain.so_far + beside_tensors(ledger))
        facts: dict[str, Any] = {
            "operator": error.operator,
            "needed_bytes": error.needed_bytes,
            "pinned": error.pinned,
            "least_budget_bytes": error.least_budget_bytes,
            "called": error.called,
            "called_bytes": error.called_bytes,
            "training": None,
            "expected_bytes": 0,
            "likely_bytes": 0,
            "expected_slowdown": 1.0,
            "plain_bytes": 0,
            "basis": "",
            "hint": "",
            "held_by": {},
            "holds": None,
        }
        is_first, self.error = self.error is None, facts
        moment: Any = Moment(self.dtr, inputs)  # in place of the parts themselves
        signatures = self._signatures(failed)
        growth = self.device.pool_growth_bytes()
        at_once = error.needed_bytes + sum({one.key: one.nbytes for one in inputs}.values())
        # A later error's advice may be asked for when the graph has gone.
        rehearsal = Rehearsal(self.dtr, self._heuristic, inputs) if is_first else None
        of_device, of_collector = self.device.hint(), "" if gc.isenabled() else UNCOLLECTED
        if self.adapting is not None:
            of_device = ". ".join(filter(None, (of_device, self.adapting.hint(error.least_budget_bytes))))

        def advice(error: BudgetError) -> Advice:
            try:
                with moment.again():
                    program = Program.look(moment.place)
                    training, labels = program.training, Labels(moment)
                    known = plain._replace(run=self.plain_bytes())
                    given = moment, signatures, training, error, moment.inputs, failed, rehearsal
                    advised = advised_budget(Refused(*given), known, growth)
                    program = program._replace(also=labels.unknown(training), traceback=error.__traceback__)
                    now = Now(0, moment.step_age, (), by_name)
                    held = hold(moment, now, program, LONGEST_NS)
                    rows = labels.named(training, held.holders)
                    # Once the program has gone on, its graphs are others.
                    holds = told(held) if held.nbytes and ledger.age == moment.age else None
                    own = hint(moment, held.holders, error, failed, moment)
            except Exception as why:  # optimizers and tensors may be of any class
                return Advice(hint=". ".join(filter(None, (of_device, unnamed(why), of_collector))))
            of_host = self.host.hint(training.totals(), moment.limit)
            of_compiled = self._remedy(error.operator, at_once)
            hints = ". ".join(filter(None, (of_device, of_host, own, of_compiled, of_collector)))
            pinned = relabelled(facts["pinned"], rows)
            found = Advice(training.totals(), advised.expected, hints, pinned, held_by(rows), holds)
            found = found._replace(likely_bytes=advised.likely, plain_bytes=advised.plain)
            found = found._replace(expected_slowdown=advised.slowdown, basis=advised.basis)
            facts.update(found._asdict())
            return found

        error.explain(advice, FOR_A_BLOCK if self.writer is None else FOR_A_COMMAND, self.ledger.device_type)
        if is_first:  # what turns errors into others, such as TorchScript, does not ask, and loses the error
            str(error)
        self._notices.budget_error = error.without_advice

    def _plain(self, error: BudgetError, failed: Signature | None) -> Plain:
        plain = Plain.of(self.ledger, self._peak_of_steps, self.steps.count, error, failed)
        return plain._replace(kept_a_step=growth_of(self._held))

    def _signatures(self, failed: Signature | None) -> list[Signature]:
        """Return the signatures of the calls so far, and that of the one that has failed."""
        signatures = self.callbacks.signatures.all()
        if failed is not None and failed.geometries and all(one is not failed for one in signatures):
            signatures.append(failed)  # a first call
        return signatures

    def _advised(self, error: BudgetError, inputs: Sequence[Version], failed: Signature | None) -> Advised:
        """Return the budgets that the error of a call would name, without raising it."""
        moment: Any = Moment(self.dtr, inputs)
        training = find_training(moment.place)
        rehearsal = Rehearsal(self.dtr, self._heuristic, inputs)
        refused = Refused(moment, self._signatures(failed), training, error, inputs, failed, rehearsal)
        plain = self._plain(error, failed)._replace(run=self.plain_bytes())
        return advised_budget(refused, plain, self.device.pool_growth_bytes())

    def _collect_garbage(self, *generation: int) -> None:
        # The program's finalizers run here. Their operators are intercepted like any others, except in the
        # middle of a rematerialization.
        seen = nullcontext() if self.dtr.eviction.replaying else interposed()
        with self.callbacks.turns.given_up(), seen:
            gc.collect(*generation)

    @property
    def _heuristic(self) -> str:
        """The present heuristic, or one that needs no foresight and runs no code of the user's."""
        name = self.settings.heuristic if self.rule is None else str(self.rule["heuristic"])
        return STEADY if name == AUTO or ":" in name or self.ledger.policy.heuristic.foresight else name

    def plain_bytes(self) -> int:
        """Return what this command's tensors have taken in earlier runs without a budget; 0 if unknown."""
        return 0 if self._peak is None else self._peak.read()

    def keep_peak(self) -> None:
        """Remember, at the end of the program, what its tensors would take without a budget."""
        if self._peak is not None and self.error is None and self.ledger.age:
            self._peak.write(self.ledger.plain_peak_bytes, self.ledger.age)

    # -- time ------------------------------------------------------------------------------------

    def times(self) -> dict[str, int]:
        """Return the nanoseconds since the session's start, in total and by purpose."""
        policy, ledger, on_gpu = self.dtr.policy, self.ledger, self.device.type != "cpu"
        wall = now_ns() - self._started_ns
        waited = self._waits.ns() - self._waited_ns
        counted = *self.interposer.brief_ns, self.callbacks.brief_ns, self.callbacks.long_ns
        brief, own, cold, in_python, long = self._own_time.add(wall, waited, counted)
        unseen = unseen_ns(own, cold, in_python)
        own += in_python + long
        operators = self.interposer.operators_ns + brief
        avoiding = min(self.device.avoiding_ns(), operators)
        operators -= avoiding
        recomputing, making_room = self.dtr.rematerializer.operators_ns, self.dtr.eviction.making_room_ns
        copying = self.host.ns()
        bookkeeping = (
            self.interposer.bookkeeping_ns
            + own
            + avoiding
            + self.dtr.rematerializer.under_way_ns()
            - (shapes.loading_ns - self._loading_ns)  # an import, not work on a step
        )
        rest = wall - operators - recomputing - making_room - bookkeeping
        bookkeeping += max(min(unseen, rest), 0) + making_room - copying
        return {
            "wall_ns": wall,
            "operators_ns": operators,
            "rematerialization_ns": recomputing,
            "scoring_ns": policy.scoring_ns,
            "search_ns": policy.search_ns,
            "bookkeeping_ns": max(bookkeeping - policy.scoring_ns - policy.search_ns, 0),
            "device_operators_ns": ledger.clock - ledger.recomputed_cost if on_gpu else 0,
            "device_rematerialization_ns": ledger.recomputed_cost if on_gpu else 0,
            "allocator_ns": self.device.waited_ns(),
            "host_ns": copying,
        }

    def stop_learning(self) -> None:
        """End a search for a better rule, and delete its files."""
        if self._learning is not None:
            self._learning.remove()

    def _own_work(self) -> Own:
        return self.callbacks.own(is_long=True)

    def _tick(self) -> None:
        """Called periodically, by operators and in replays. Sets the time of the next call."""
        # In a replay, its time is that of the rematerialization.
        with nullcontext() if self.dtr.eviction.replaying else self._own_work():
            self._tick_now()

    def _tick_now(self) -> None:
        if self._final is not None:
            return self._look_whether_over()
        # Not within a replay: compaction may itself replay, which would tick again.
        if self.ledger.age - self._compacted_age > COMPACT_EVERY and not self.dtr.eviction.replaying:
            self._compact()
        self._notices.look_for_modules()
        self.interposer.look()
        self.device.look(settles=False)
        self._launcher.look()
        self._publish()
        self.callbacks.next_tick = now_ns() + PUBLISH_NS
        step = self.steps.under_way()
        if self._learning is not None:
            self._learning.step_goes_on(step)
        if self._no_optimizer():
            self._thrashing.watch_time(publish.totals(self))
        else:
            self._thrashing.watch(step, GRACE_NS)

    def _publish(self) -> None:
        self._say_by_how_much()
        if self.writer is not None and os.getpid() == self._pid:
            with suppress(OSError, ValueError):
                publish.write(self, self.writer)

    def _say_by_how_much(self) -> None:
        """Alert that the budget is exceeded, and again if that has become a lesser part of the truth."""
        said, before = self._said_exceeded
        ledger, eviction = self.ledger, self.dtr.eviction
        excess = ledger.exceeded_bytes
        if not (eviction.over_budget and eviction.warn_only) or ledger.budget_bytes is None:
            return
        if said and excess <= before + before // NEWS:
            return
        rest = ""
        if eviction.adapts and ledger.is_raised:
            rest = ADAPTED.format(operator=eviction.exceeded_by, limit=format_size_up(ledger.limit))
        text = EXCEEDED.format(
            budget=format_size(ledger.budget_bytes),
            excess=f" by {format_size_up(excess)}" if excess else "",
            how=self.settings.over_budget,
            rest=rest,
        )
        self.warnings.pop(said, None)
        self._said_exceeded = text, excess
        self.alert(text)

    def _between_replays(self) -> None:
        """Called after each replayed operator, since a rematerialization may take minutes."""
        if now_ns() > self.callbacks.next_tick:
            self._tick()

    def _compact(self) -> None:
        with self._lock:
            self.ledger.collect_dead()
            self.dtr.history.compact(self._compacted_age)
            self._compacted_age = self.ledger.age

    def _no_optimizer(self) -> bool:
        return not (self.steps.count or self._gradients.optimizers)

    def _backward_ended(self) -> None:
        """The end of a backward pass, which marks a step in a program without an optimizer."""
        with self._lock:
            self.dtr.history.end_period()
            if self._at_peak is not None and self._no_optimizer():
                self._at_peak.step_ended()

    def _step_ended(self) -> None:
        if self._final is not None:
            with self._lock:
                self.dtr.history.end_step()
            return
        with self._lock:
            self.dtr.history.end_step()
            observers = (self._recorder, self._lookahead, self._learning, self._where, self._at_peak)
            for part in (*observers, self.adapting):
                if part is not None:
                    part.step_ended()
            if self._ranks is not None:
                self._ranks.step_ended(self.steps.count, self.ledger.age)
            if self.steps.last is not None:
                self.steps.last["peak_bytes"] = self.ledger.most("step_peak_bytes")
            for _ in self.ledger.in_turn():
                self.ledger.step_peak_bytes = self.ledger.resident_bytes
            self._peak_of_steps = self.ledger.plain_peak_bytes
            self._held.append(self.ledger.plain_bytes)
            self.device.step_ended()
            self._settle_fingerprints()
            if self.steps.count <= LEARNING:
                self.callbacks.signatures.measure_again()
            elif self._recorder is None:
                limited = self.ledger.budget_bytes is not None
                self.interposer.count_only(steady=limited and self.steps.take_as_much())
        assert self.steps.last is not None
        self._checkpointing.step_ended(self.dtr.rematerializer.rematerializations > 0)
        self._thrashing.watch(self.steps.last)

    def _end_if_enough(self) -> None:
        """End the script after the last step that is wanted (`--max-steps`, `dtrrun peak`)."""
        if self._final is not None:
            return
        over = self.settings.max_steps is not None and self.steps.count >= self.settings.max_steps
        if over or (self.settings.peak_only and self._at_peak is not None and self._at_peak.over):
            self._publish()
            end_script(0)

    # -- fork ------------------------------------------------------------------------------------

    def _before_fork(self) -> None:
        """Bring back what fits into the budget, once for all children: they inherit our memory.

        What does not fit is left to each child: here, something else would be evicted for it. The lock keeps
        other threads from being in the middle of a change, half of which the child would inherit.
        """
        self._lock.__enter__()
        try:
            # A forked child can't use its parent's CUDA.
            if self.running and not self.left and self.device.type == "cpu":
                with suppress(torch.OutOfMemoryError):
                    self.dtr.rematerializer.restore_all(fitting=True)
        finally:
            self.interposer.threads.entering.acquire()  # last: what is restored may run code of the program

    def _after_fork_in_parent(self) -> None:
        self.host.forked()
        self.interposer.threads.entering.release()
        self._lock.release()

    def _after_fork_in_child(self) -> None:
        if not self.running:
            return
        if self.writer is not None:
            self.writer.forked()
            self.writer = None
        self.interposer.threads.entering.release()
        self._lock.release()  # the child's only thread is the one that holds it
        python_warnings.filterwarnings("ignore", message=".*dtrrun.*")
        self.interposer.threads.forked = True
        enabled = gc.isenabled()
        gc.disable()  # a collection writes to every object, so the system would copy all their pages
        try:
            self._stop(self._restore_in_child)
        finally:
            if enabled:
                gc.enable()
        notices.warn_when_it_trains(lambda: not fork.is_watched())

    def _restore_in_child(self) -> list[Version]:
        """Bring back what did not fit into the parent's budget, in a separate thread.

        OpenMP's threads exist only in the parent. A parallel kernel in this thread would wait for them
        forever; a new thread gets new ones.
        """
        if self._final is not None or not self.ledger.most("evicted_bytes"):
            return []
        lost: list[Version] = []
        thread = threading.Thread(target=lambda: lost.extend(self._restore_all()))
        thread.start()
        thread.join()
        return lost

    # -- report ----------------------------------------------------------------------------------

    @property
    def group(self) -> dict[str, Any] | None:
        """This process's rank, and what the ranks of its program share; None if it has been in no group.

        Nothing else tells the rank of a process that `torch.multiprocessing.spawn` has started.
        """
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if self._group is None and c10d is not None and c10d.is_initialized():
            self._group = {"rank": c10d.get_rank(), "world": f"{os.getppid()} {c10d.get_world_size()}"}
        return self._group

    @property
    def at_peak(self) -> dict[str, Any] | None:
        """What holds the peak, under `--peak`."""
        return None if self._at_peak is None else self._at_peak.table

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have stepped."""
        return self._labels.optimizers

    def pinned(self, *, lately: bool = False) -> list[Row]:
        """Return what can't be evicted, the largest first. At the end, names what holds it if it is much.

        Of several GPUs, it is about the first. lately: what was found not long ago is enough.
        """
        with self.ledger.on(0):
            rows = self._labels.rows(lately=lately and not self.ending)
            budget_bytes = self.ledger.budget_bytes
            if self.ending and budget_bytes is not None and without_role_bytes(rows) >= NAMED * budget_bytes:
                with suppress(Exception):  # optimizers and tensors may be of any class
                    return self._labels.searched(find_training(self.ledger.device_type))
            return rows

    def report(self) -> dict[str, Any]:
        """Return the figures so far: the counters of `telemetry.fields`, and tables.

        `operators` is the table of replayed operators, not the counter of that name. `sufficient_bytes` is
        the budget in which nothing would have been evicted: the peak of tensors, and on a GPU all else that
        the driver shows for the process.
        """
        if self._final is not None:
            return self._final | {"warnings": publish.warnings(self)}
        with self._lock:
            self.ledger.collect_dead()
            return self._figures()

    def _figures(self) -> dict[str, Any]:
        self._say_by_how_much()
        self._settle_fingerprints()
        counters = publish.counters(self)
        sufficient = {"sufficient_bytes": self.device.sufficient_bytes(counters)}
        return counters | publish.tables(self) | sufficient
