"""Predicts dtrrun's own runtime for a recorded step under a budget (`--semantics dtrrun`).

The log says what the program does. The core of the live runtime decides what follows, on stand-ins for
storages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from dtrrun.bindings import graph, make_policy
from dtrrun.core.backend import Policy
from dtrrun.core.dtr import DTR
from dtrrun.core.foresight import Foresight, WatchedStep
from dtrrun.core.graph import Overwritten, Signature, Version
from dtrrun.core.observer import (
    COMPACTS,
    ESCAPES,
    PERIOD_ENDS,
    PINNED,
    RESIZED,
    RESTORES,
    TRUSTED,
    WRITTEN_OUTSIDE,
    Observer,
)
from dtrrun.core.operator import ELSEWHERE, FOREIGN, Output
from dtrrun.core.operator import Call as AnyCall

from .log import START, Annotate, Call, Constant, Instruction, LogError, Mutate, Release, read_log
from .replay import Outcome, Stopped
from .snapshot import new_signature, restore
from .standins import Content, OutOfBudget, StandInExecutor, StandInMemory

FORMAT = 1


@dataclass
class PredictedStep:
    """One step: counts, and times in ns."""

    index: int
    time: int
    plain_time: int
    peak_bytes: int
    evictions: int
    rematerializations: int
    evaluations: int = field(default=0, compare=False)
    """Score evaluations: a cost of the search, not part of its result."""


@dataclass
class Prediction(Outcome):
    steps: list[PredictedStep] = field(default_factory=list)
    """The steps that the log contains to their end."""
    least_budget_bytes: int | None = None
    """oom: the least budget for the operator that did not fit."""


def predict(
    log: str | Path | Sequence[Instruction],
    budget_bytes: int | None,
    heuristic: str = "h_dtr_eq",
    *,
    limit: float = 2.0,
    warn_only: bool = False,
    watched: Callable[[], Sequence[WatchedStep]] | None = None,
    name: str = "the log",
    **options: Any,
) -> Prediction:
    """Replay a log of `dtrrun record` as the runtime would run it with the budget set from the beginning.

    limit: multiple of the plain run's time; a run that recomputes more ends as `thrash` (Sec. 4.2).
    warn_only: as `--over-budget warn`. watched: returns the steps known to a heuristic with foresight; those
    of this log if None. name: for errors, if `log` is no path. options: of `make_policy`. Raises LogError for
    a log not made by `dtrrun record`, OSError, and CannotBuild.
    """
    if isinstance(log, (str, Path)):
        name, log = str(log), read_log(log)
    instructions = log
    head = _head(instructions, name)
    policy = make_policy(heuristic, **options)
    plain = sum(_plain_cost(one) for one in instructions)
    run = _Run(head, budget_bytes, policy, (limit - 1) * plain if limit < inf else inf, warn_only)
    if policy.heuristic.foresight:
        policy.foresight = Foresight(run.ledger, watched() if watched else watched_steps(instructions, name))
    return run.go(instructions, name)


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


def watched_steps(instructions: Sequence[Instruction], name: str = "the log") -> list[WatchedStep]:
    """Return the steps of a log as the runtime would have recorded them. Raises like `predict`."""
    run = _Run(_head(instructions, name), None, make_policy("size"), inf, warn_only=False)
    run.watch()
    run.go(instructions, name)
    return run.watched


def _plain_cost(one: Instruction) -> int:
    """Views cost nothing: they come back with their storage."""
    if isinstance(one, (Call, Mutate)) and one.facts and not one.facts.get("view"):
        return one.cost
    return 0


class LoggedCall(AnyCall):
    """An operator of a log, with the facts that the runtime recorded of a `TensorCall`."""

    def __init__(self, name: str, cost: int, facts: dict[str, Any], versions: list[Version]) -> None:
        super().__init__()
        self.signature = new_signature(name, cost, facts["bytes"])
        self.cost, self.versions = cost, versions
        self.written = {id(versions[holes[0]]): holes for holes in facts.get("written", ())}
        self._places = list(self.written.values())
        self._leaves, self._whole = facts.get("leaves", ()), dict(facts.get("overwritten", ()))
        self._resized: dict[str, int] = facts.get("resized", {})
        self._again: int = facts.get("again", facts["bytes"])
        self.statistics = facts.get("statistics", ())
        self.updates_statistics = bool(facts.get("updates"))
        self.replayable = not facts.get("once")
        self.view, self.untouching = bool(facts.get("view")), bool(facts.get("untouching"))
        self.reshapes, self.opaque = bool(facts.get("reshapes")), bool(facts.get("opaque"))
        self.uninitialised, self.shrinks = bool(facts.get("uninitialised")), bool(facts.get("shrinks"))

    def is_leaf(self, place: int) -> bool:
        return self._places[place][0] in self._leaves

    def overwrites(self, place: int) -> bool:
        return place in self._whole

    def overwritten(self, place: int) -> Overwritten:
        return Overwritten(self._whole[place], 0, None)

    def resized(self, hole: int, version: Version) -> int | None:
        return self._resized.get(str(hole))

    def recorded(self) -> None:
        return None

    def replay_signature(self) -> Signature:
        signature = self.signature
        return new_signature(signature.operator.name, signature.cost, self._again)


class _Watch(Observer):
    """Records a step for heuristics with foresight."""

    def __init__(self, dtr: DTR) -> None:
        self._ledger, self._history = dtr.ledger, dtr.history
        self.steps: list[WatchedStep] = []

    def begin(self) -> None:
        for step in self.steps[-2:]:
            step.end(self._history)
        self.steps.append(WatchedStep(self._ledger.age))

    def finished(self, call: AnyCall, outputs: Sequence[Output]) -> None:
        if not call.view:
            self.steps[-1].watch(self._ledger, call.signature.operator.name, call.cost, call.versions)


class _Run:
    def __init__(
        self,
        head: dict[str, Any],
        budget_bytes: int | None,
        policy: Policy,
        limit: float,
        warn_only: bool,
    ) -> None:
        self.dtr = DTR(
            policy,
            graph(),
            StandInMemory(),
            StandInExecutor(limit),
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
        self.contents: dict[int, Content] = {}
        self._locks: dict[int, list[Version]] = {}
        self._plain = 0
        self._steps: list[PredictedStep] = []
        self._before = self._totals()
        self._watch: _Watch | None = None

    def watch(self) -> None:
        """Record the steps that begin from now on."""
        self.ledger.begin_pressure()  # a run under a budget is watched, and copies weights (`core.copies`)
        self._watch = _Watch(self.dtr)
        self._watch.begin()
        self.ledger.observers.append(self._watch)

    @property
    def watched(self) -> list[WatchedStep]:
        return self._watch.steps if self._watch is not None else []

    def version(self, number: int) -> Version:
        return self.ledger.versions[id(self.contents[number])]

    def go(self, instructions: Sequence[Instruction], name: str) -> Prediction:
        started = perf_counter()
        begin = self.ledger.clock
        status, least = "ok", None
        place = 0
        try:
            for place, one in enumerate(instructions):  # noqa: B007 - for the message
                self._next(one)
        except Stopped as stopped:
            status = stopped.status
        except OutOfBudget as error:
            status, least = "oom", error.least_budget_bytes
        except (KeyError, IndexError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise LogError(f"{name}, instruction {place + 1}: facts that do not fit ({what})") from error
        return Prediction(
            status,
            self.ledger.clock - begin,
            self._plain,
            self.ledger.peak_bytes,
            self.dtr.eviction.evictions,
            self.dtr.rematerializer.rematerializations,
            self.dtr.policy.score_evaluations,
            perf_counter() - started,
            self._steps,
            least,
            chosen=self.dtr.eviction.evictions,
        )

    def _next(self, one: Instruction) -> None:
        facts = one.facts if isinstance(one, (Annotate, Call, Constant, Mutate, Release)) else None
        if not facts:
            return
        if isinstance(one, (Call, Mutate)):
            self._plain += _plain_cost(one)
            self._operator(one.operator, one.cost, facts)
        elif isinstance(one, Release):
            del self.contents[facts["storage"]]
        elif isinstance(one, Constant):
            self._constant(one.nbytes, facts)
        elif isinstance(one, Annotate) and one.text != START:
            _EVENTS[one.text](self, facts)

    # -- operators -------------------------------------------------------------------------------

    def _operator(self, name: str, cost: int, facts: dict[str, Any]) -> None:
        """Raises OutOfBudget or Stopped."""
        ledger, operators = self.ledger, self.dtr.operators
        ledger.collect_dead()
        if facts.get("short"):  # a view on the fast path
            version = self.version(facts["in"][0])
            if version.resident or facts.get("untouching"):
                version.last_access = ledger.clock
                ledger.age += 1
                return
        call = self._call(name, cost, facts)
        operators.admit(call)
        call.handed_out = [self.version(number) for number in facts.get("taken", ())]
        outputs = [self._output(*one) for one in facts.get("out", ())]
        operators.finish(call, outputs, plain=not facts.get("sparse"))

    def _call(self, name: str, cost: int, facts: dict[str, Any]) -> LoggedCall:
        call = LoggedCall(name, cost, facts, [self.version(number) for number in facts["in"]])
        for hole in facts.get("leaves", ()):
            if call.versions[hole].pin is None:
                call.versions[hole].pin = "parameter"
        return call

    def _output(self, where: int, number: int, nbytes: int, kind: str) -> Output:
        content = Content(nbytes, kind if kind == ELSEWHERE else "ours", ours=kind != FOREIGN)
        self.contents[number] = content
        return where, content, kind

    def _failed(self, facts: dict[str, Any]) -> None:
        self.ledger.collect_dead()
        call = self._call("failed", 0, facts)
        self.dtr.operators.admit(call)
        self.dtr.operators.fail(call)

    # -- what is no operator ---------------------------------------------------------------------

    def _constant(self, nbytes: int, facts: dict[str, Any]) -> None:
        elsewhere = facts["pin"] == "other device"
        foreign = facts["pin"] == "foreign memory"
        self.ledger.collect_dead()  # before making a stand-in that may get the id of one that died
        content = Content(nbytes, ELSEWHERE if elsewhere else "ours", not foreign)
        self.contents[facts["storage"]] = content
        version = self.dtr.operators.adopt(content)
        version.pin = facts["pin"]
        version.escaped = facts["exposed"]

    def _totals(self) -> tuple[int, ...]:
        dtr = self.dtr
        evictions, again = dtr.eviction.evictions, dtr.rematerializer.rematerializations
        return self.ledger.clock, self._plain, evictions, again, dtr.policy.score_evaluations

    def _state(self, facts: dict[str, Any]) -> None:
        restore(self.dtr, facts, self.contents)
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

    def _escape(self, facts: dict[str, Any]) -> None:
        self.dtr.mutation.escape(self.version(facts["storage"]), facts["why"])

    def _trust(self, facts: dict[str, Any]) -> None:
        self.version(facts["storage"]).escaped = False

    def _outside(self, facts: dict[str, Any]) -> None:
        version = self.version(facts["storage"])
        self.dtr.mutation.written_outside(version, facts["why"], escapes=facts["exposes"])

    def _resized(self, facts: dict[str, Any]) -> None:
        version = self.version(facts["storage"])
        self.dtr.eviction.make_room(max(facts["bytes"] - version.nbytes, 0), "UntypedStorage.resize_")
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
    ESCAPES: _Run._escape,
    WRITTEN_OUTSIDE: _Run._outside,
    TRUSTED: _Run._trust,
    RESIZED: _Run._resized,
    COMPACTS: _Run._compact,
    PERIOD_ENDS: _Run._period,
    RESTORES: _Run._restore,
    "FAILED": _Run._failed,
}
