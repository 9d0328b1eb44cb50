"""Predicts how dtrrun's own runtime runs a recorded step under a budget (`--semantics dtrrun`).

The log says what the program does. The live runtime's own core makes the decisions, on stand-ins for
storages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from dtrrun.bindings import graph, load, make_policy
from dtrrun.core.backend import Policy
from dtrrun.core.dtr import DTR
from dtrrun.core.foresight import Foresight, WatchedStep
from dtrrun.core.graph import Version
from dtrrun.core.host import HostMemory
from dtrrun.core.observer import (
    COMPACTS,
    ESCAPES,
    FIXED,
    PERIOD_ENDS,
    PINNED,
    RESIZED,
    RESTORES,
    TRUSTED,
    WRITTEN_OUTSIDE,
)

from .log import START, Annotate, Call, Constant, Instruction, LogError, Mutate, Release, read_log
from .replay import ReplayOutcome, Stopped
from .snapshot import new_signature, restore
from .standins import OutOfBudget, StandInExecutor, StandInMemory

FORMAT = 1
FAILED = "FAILED"  # an operator that raised an error


@dataclass
class PredictedStep:
    """One step: counts, and times in ns. `time` includes the copies."""

    index: int
    time: int
    plain_time: int
    peak_bytes: int
    evictions: int
    rematerializations: int
    evaluations: int = field(default=0, compare=False)
    """Score evaluations: a cost of the search, not part of its result."""
    copies_out: int = 0
    copies_in: int = 0
    copying: int = 0
    """The part of `time` that the copies take."""


@dataclass
class Prediction(ReplayOutcome):
    """The times include the copies to the host and back."""

    steps: list[PredictedStep] = field(default_factory=list)
    """The steps that the log contains in full."""
    least_budget_bytes: int | None = None
    """If the status is oom: the least budget for the operator that did not fit."""


def predict(
    log: str | Path | Sequence[Instruction],
    budget_bytes: int | None,
    heuristic: str = "h_dtr_eq",
    *,
    host: HostMemory | None = None,
    limit: float = 2.0,
    warn_only: bool = False,
    watched: Callable[[], Sequence[WatchedStep]] | None = None,
    name: str = "the log",
    **options: Any,
) -> Prediction:
    """Replay a log of `dtrrun record` as the runtime would run it with the budget set from the beginning.

    host: where tensors may leave for; if None, where they could in the session that wrote the log. limit:
    multiple of the plain run's time; a run that recomputes and copies more ends as `thrash` (Sec. 4.2).
    warn_only: as `--over-budget evict`. watched: returns the steps known to a heuristic with foresight; those
    of this log if None. name: for errors, if `log` is not a path. options: for `make_policy`. Raises LogError
    for a log not made by `dtrrun record`, OSError, and CannotBuild.
    """
    if isinstance(log, (str, Path)):
        name, log = str(log), read_log(log)
    program = compiled(log, name)
    policy = make_policy(heuristic, **options)
    spare = (limit - 1) * program.plain_ns if limit < inf else inf
    run = _Run(program, budget_bytes, policy, spare, warn_only, host or _host_of(program.head))
    if policy.heuristic.foresight:
        policy.foresight = Foresight(run.ledger, watched() if watched else watched_steps(log, name))
    return run.go()


class Compiled:
    """A log compiled once for any number of runs. `head`: the facts of its first instruction."""

    def __init__(self, instructions: Sequence[Instruction], name: str) -> None:
        """name: for errors. Raises LogError, and CannotBuild."""
        self.head, self.name = _head(instructions, name), name
        self.plain_ns = 0  # without any recomputation
        self.program = load().LoggedProgram(*self.head.get("rates", ()))
        place = 0
        try:
            for place, one in enumerate(instructions):  # noqa: B007 - for the message
                self._add(one)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _not_fitting(name, place, error) from error

    def _add(self, one: Instruction) -> None:
        facts = one.facts if isinstance(one, (Annotate, Call, Constant, Mutate, Release)) else None
        if not facts:
            self.program.add_nothing()
        elif isinstance(one, (Call, Mutate)):
            self.plain_ns += 0 if facts.get("view") else one.cost
            self._add_operator(one.operator, one.cost, facts, fails=False)
        elif isinstance(one, Release):
            self.program.add_release(facts["storage"])
        elif isinstance(one, Constant):
            self.program.add_constant(one.nbytes, facts)
        elif not isinstance(one, Annotate):
            raise TypeError(type(one).__name__)
        elif one.text == FAILED:
            self._add_operator("failed", 0, facts, fails=True)
        elif one.text == START:
            self.program.add_nothing()
        else:
            self.program.add_event(one.text, facts)

    def _add_operator(self, name: str, cost: int, facts: dict[str, Any], *, fails: bool) -> None:
        signature = again = new_signature(name, cost, facts["bytes"])
        if "again" in facts:
            again = new_signature(name, cost, facts["again"])
        self.program.add_operator(signature, again, cost, facts, fails)


def compiled(instructions: Sequence[Instruction], name: str) -> Compiled:
    """Return a compiled log. Predictions of the same log share it while it is among the last KEPT."""
    for known, program in _compiled:
        if known is instructions:
            return program
    program = Compiled(instructions, name)
    _compiled.append((instructions, program))
    del _compiled[:-KEPT]
    return program


KEPT = 2  # compiled logs in the cache
_compiled: list[tuple[Sequence[Instruction], Compiled]] = []


def _head(instructions: Sequence[Instruction], name: str) -> dict[str, Any]:
    head = instructions[0] if instructions else None
    if not (isinstance(head, Annotate) and head.text == START and head.facts):
        raise LogError(f"{name}: --semantics dtrrun needs a log that dtrrun record has written")
    if head.facts.get("format") != FORMAT:
        raise LogError(
            f"{name}: the log has format {head.facts.get('format')}, and this version of dtrrun reads "
            f"{FORMAT}: record it again"
        )
    return head.facts


def _host_of(head: dict[str, Any]) -> HostMemory | None:
    return HostMemory(*head["host"]) if "host" in head else None


def device_of(log: Sequence[Instruction], name: str = "the log") -> str:
    """Return the type of the device that a log was recorded on. Raises LogError as `predict` does."""
    return str(_head(log, name)["device"])


def _not_fitting(name: str, place: int, error: Exception) -> LogError:
    what = f"{type(error).__name__}: {error}"
    return LogError(f"{name}, instruction {place + 1}: facts that do not fit ({what})")


def watched_steps(instructions: Sequence[Instruction], name: str = "the log") -> list[WatchedStep]:
    """Return the steps of a log as the runtime would have recorded them. Raises as `predict` does."""
    run = _Run(compiled(instructions, name), None, make_policy("size"), inf, warn_only=False)
    watch = run.watch()
    run.go()
    return watch.steps


class _Watch:
    """Records steps for heuristics with foresight."""

    def __init__(self, dtr: DTR) -> None:
        self._ledger, self._history = dtr.ledger, dtr.history
        self.steps: list[WatchedStep] = []

    def begin(self) -> None:
        for step in self.steps[-2:]:
            step.end(self._history.rescued_since)
        self.steps.append(WatchedStep(self._ledger.age))

    def ran(self, name: str, cost: int, versions: Sequence[Version]) -> None:
        self.steps[-1].watch(self._ledger, name, cost, versions)


class _Run:
    """One run of a log. C++ runs its operators (`bindings/logged.h`)."""

    def __init__(
        self,
        program: Compiled,
        budget_bytes: int | None,
        policy: Policy,
        limit: float,
        warn_only: bool,
        host: HostMemory | None = None,
    ) -> None:
        """limit: ns that recomputation and copies may take."""
        head, self._name = program.head, program.name
        self.dtr = DTR(
            policy,
            graph(),
            StandInMemory(),
            StandInExecutor(),
            budget_bytes=budget_bytes,
            budget_error=OutOfBudget,
            out_of_memory=OutOfBudget,
            device_type="ours",
            warn_only=warn_only,
            collect_garbage=None,
        )
        self.ledger = ledger = self.dtr.ledger
        ledger.clock, ledger.age = head["clock"], head["age"]
        ledger.step_age = self.dtr.history.cut_age = head["step_age"]
        self.dtr.history.former_step_age = head.get("former_step_age", head["step_age"])
        ledger.step_began = ledger.clock - head.get("work_so_far", 0)
        ledger.step_work = head.get("step_work", 0)
        self.dtr.history.former_work = head.get("former_work", 0)
        if host is not None and budget_bytes is not None:
            load().open_host(ledger, *host)
        self._leaves = ledger.host is not None and head.get("constants_leave", False)
        self.run = load().LoggedRun(program.program, ledger, self._event, limit)
        self._locks: dict[int, list[Version]] = {}
        self._steps: list[PredictedStep] = []
        self._before = self._totals()
        self._watch: _Watch | None = None

    def watch(self) -> _Watch:
        """Record the steps that begin from now on."""
        self.ledger.begin_pressure()  # as in the watched run, which has a budget and so copies weights
        self._watch = _Watch(self.dtr)
        self._watch.begin()
        self.run.watch = self._watch.ran
        return self._watch

    def version(self, number: int) -> Version:
        found: Version = self.run.version(number)
        return found

    def go(self) -> Prediction:
        started = perf_counter()
        begin = self._now
        status, least = "ok", None
        try:
            self.run.go()
        except Stopped as stopped:
            status = stopped.status
        except OutOfBudget as error:
            status, least = "oom", error.least_budget_bytes
        except (KeyError, IndexError, TypeError) as error:
            raise _not_fitting(self._name, self.run.place, error) from error
        host = self.ledger.host or {}
        return Prediction(
            status,
            self._now - begin,
            self.run.plain_ns,
            self.ledger.most("peak_bytes"),
            self.dtr.eviction.evictions,
            self.dtr.rematerializer.rematerializations,
            self.dtr.policy.score_evaluations,
            perf_counter() - started,
            self._steps,
            least,
            chosen=self.dtr.eviction.evictions,
            copies_out=host.get("copies_out", 0),
            copies_in=host.get("copies_in", 0),
            host_peak_bytes=host.get("peak_bytes", 0),
        )

    @property
    def _copying(self) -> int:
        """The time that the program has waited for copies, in ns."""
        host: Mapping[str, int] = self.ledger.host or {}
        return host.get("waited_ns", 0)

    @property
    def _now(self) -> int:
        """The time that operators and copies have taken, in ns."""
        return self.ledger.clock + self._copying

    def _totals(self) -> tuple[int, ...]:
        dtr, host = self.dtr, self.ledger.host or {}
        evictions, again = dtr.eviction.evictions, dtr.rematerializer.rematerializations
        searched = dtr.policy.score_evaluations
        copies = host.get("copies_out", 0), host.get("copies_in", 0)
        return self._now, self.run.plain_ns, evictions, again, searched, *copies, self._copying

    # -- events other than operators -------------------------------------------------------------

    def _event(self, text: str, facts: dict[str, Any]) -> None:
        _EVENTS[text](self, facts)

    def _state(self, facts: dict[str, Any]) -> None:
        restore(self.dtr, facts, self.run.enter, self.run.content)
        if self._leaves:
            self.ledger.let_constants_leave()
        self.dtr.eviction.make_room(0, "set_budget")

    def _step(self, facts: dict[str, Any]) -> None:
        ledger = self.ledger
        self.dtr.history.end_step()
        now = self._totals()
        time, plain, *counts = (a - b for a, b in zip(now, self._before, strict=True))
        self._steps.append(PredictedStep(facts["step"], time, plain, ledger.step_peak_bytes, *counts))
        self._before = now
        ledger.step_peak_bytes = ledger.resident_bytes
        if ledger.policy.foresight is not None:
            ledger.policy.foresight.begin()
        if self._watch is not None:
            self._watch.begin()

    def _lock(self, facts: dict[str, Any]) -> None:
        self.ledger.collect_dead()
        versions = [self.version(number) for number in facts["storages"]]
        self.dtr.rematerializer.lock(versions)
        self._locks[facts["lock"]] = versions

    def _unlock(self, facts: dict[str, Any]) -> None:
        for version in self._locks.pop(facts["lock"], ()):
            version.locks -= 1

    def _pin(self, facts: dict[str, Any]) -> None:
        version = self.version(facts["storage"])
        self.dtr.rematerializer.lock([version])
        version.locks -= 1
        self.dtr.recipes.pin(version, facts["why"])

    def _fix(self, facts: dict[str, Any]) -> None:
        self.version(facts["storage"]).fixed = True

    def _escape(self, facts: dict[str, Any]) -> None:
        self.dtr.mutation.escape(self.version(facts["storage"]), facts["why"])

    def _trust(self, facts: dict[str, Any]) -> None:
        version = self.version(facts["storage"])
        version.escaped, version.fixed = False, True  # of memory that is another's, it does not leave

    def _outside(self, facts: dict[str, Any]) -> None:
        version = self.version(facts["storage"])
        self.dtr.mutation.written_outside(version, facts["why"], escapes=facts["exposes"])

    def _resized(self, facts: dict[str, Any]) -> None:
        version = self.version(facts["storage"])
        self.dtr.eviction.make_room(max(facts["bytes"] - version.nbytes, 0), "UntypedStorage.resize_")
        self.run.content(facts["storage"]).nbytes = facts["bytes"]
        self.ledger.resized(version, facts["bytes"])

    def _compact(self, facts: dict[str, Any]) -> None:
        self.dtr.history.compact(facts["age"])

    def _period(self, facts: dict[str, Any]) -> None:
        self.dtr.history.end_period()

    def _restore(self, facts: dict[str, Any]) -> None:
        self.dtr.rematerializer.restore_all(fitting=facts.get("fitting", False))


_EVENTS: dict[str, Callable[[_Run, dict[str, Any]], None]] = {
    "STATE": _Run._state,
    "STEP": _Run._step,
    "LOCK": _Run._lock,
    "UNLOCK": _Run._unlock,
    PINNED: _Run._pin,
    FIXED: _Run._fix,
    ESCAPES: _Run._escape,
    WRITTEN_OUTSIDE: _Run._outside,
    TRUSTED: _Run._trust,
    RESIZED: _Run._resized,
    COMPACTS: _Run._compact,
    PERIOD_ENDS: _Run._period,
    RESTORES: _Run._restore,
}
