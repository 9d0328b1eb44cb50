"""What our own runtime would do in a recorded step under a budget (`--semantics dtrrun`).

The log says what the program does; what follows from it is decided by the ledger, the replays and the policy
of the live runtime themselves, over stand-ins for storages. This file has what the runtime's handling of an
operator (`runtime.careful`, `calls`, `mutation`, `outcomes`) asks of them, in the same order; the tests
compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from dtrrun.ledger.record import Record
from dtrrun.policy import Policy, make_policy
from dtrrun.policy.foresight import Foresight
from dtrrun.policy.foresight import Step as Watched

from .log import START, Annotate, Call, Constant, Instruction, LogError, Mutate, Release, read_log
from .operators import Operators
from .replay import Outcome, Stopped
from .snapshot import restore
from .standins import Content, Memory, OutOfBudget, StandInLedger, StandInReplay

FORMAT = 1


@dataclass
class Step:
    """Of one step: counts, and times in ns."""

    index: int
    time: int
    plain_time: int
    peak_bytes: int
    evictions: int
    rematerializations: int
    evaluations: int = field(default=0, compare=False)
    """Of scores: what a search costs, not what it finds."""


@dataclass
class Prediction(Outcome):
    steps: list[Step] = field(default_factory=list)
    """The steps that the log has to their end."""
    least_budget_bytes: int | None = None
    """oom: what would have done for the operator that did not fit."""


def predict(
    log: str | Path | Sequence[Instruction],
    budget_bytes: int | None,
    heuristic: str = "h_dtr_eq",
    *,
    limit: float = 2.0,
    warn_only: bool = False,
    policy: Policy[Any] | None = None,
    watched: Callable[[], Sequence[Watched]] | None = None,
    name: str = "the log",
    **options: Any,
) -> Prediction:
    """Replay a log of `dtrrun record` as the runtime would run it, the budget set from its begin on.

    limit: times the plain run's time; a run that recomputes more ends as `thrash` (Sec. 4.2). warn_only: as
    `--over-budget warn`. watched: gives the steps that a heuristic with foresight knows; those of this log if
    None. name: for errors, where `log` is no path. options: of `make_policy`. Raises LogError for a log that
    is none of ours, OSError.
    """
    if isinstance(log, (str, Path)):
        name, log = str(log), read_log(log)
    instructions = log
    head = _head(instructions, name)
    if policy is None:
        policy = make_policy(heuristic, **options)
    plain = sum(_plain_cost(one) for one in instructions)
    run = _Run(head, budget_bytes, policy, (limit - 1) * plain if limit < inf else inf, warn_only)
    if policy.heuristic.foresight:
        policy.foresight = Foresight(run.ledger, watched() if watched else watched_steps(instructions, name))
    return run.go(instructions, name)


def _head(instructions: Sequence[Instruction], name: str) -> dict[str, Any]:
    head = instructions[0] if instructions else None
    if not (isinstance(head, Annotate) and head.text == START and head.facts):
        raise LogError(
            f"{name}: has not the facts that a prediction of our own runtime needs (dtrrun record)"
        )
    if head.facts.get("format") != FORMAT:
        raise LogError(f"{name}: of format {head.facts.get('format')}, not {FORMAT}: record it anew")
    return head.facts


def watched_steps(instructions: Sequence[Instruction], name: str = "the log") -> list[Watched]:
    """The steps of a log, as the runtime would have watched them. Raises as `predict`."""
    run = _Run(_head(instructions, name), None, make_policy("size"), inf, warn_only=False)
    run.watch()
    run.go(instructions, name)
    return run.watched


def _plain_cost(one: Instruction) -> int:
    """Views cost nothing: they come back with their storage."""
    if isinstance(one, (Call, Mutate)) and one.facts and not one.facts.get("view"):
        return one.cost
    return 0


class _Run:
    def __init__(
        self,
        head: dict[str, Any],
        budget_bytes: int | None,
        policy: Policy[Any],
        limit: float,
        warn_only: bool,
    ) -> None:
        memory = Memory(refill_copies=bool(head["refill_copies"]))
        self.ledger = StandInLedger(budget_bytes, policy, memory=memory, warn_only=warn_only)
        self.ledger.clock, self.ledger.age = head["clock"], head["age"]
        self.ledger.step_age = self.ledger.cut_age = head["step_age"]
        self.replay = StandInReplay(self.ledger, limit)
        self.ledger.rematerialize = self.replay.materialize
        self.contents: dict[int, Content] = {}
        self.operators = Operators(self.ledger, self.replay, self.contents)
        self._locks: dict[int, list[Record]] = {}
        self._plain = 0
        self._steps: list[Step] = []
        self._before = self._totals()
        self.watched: list[Watched] = []

    def watch(self) -> None:
        """Keep what there is to know of the step that begins now."""
        step = Watched(self.ledger.age)
        self.watched.append(step)
        self.operators.observe = lambda *operator: step.watch(self.ledger, *operator)

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
            status, least = "oom", error.args[3]
        except (KeyError, IndexError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise LogError(f"{name}, instruction {place + 1}: facts that do not fit ({what})") from error
        return Prediction(
            status,
            self.ledger.clock - begin,
            self._plain,
            self.ledger.peak_bytes,
            self.ledger.evictions,
            self.replay.rematerializations,
            self.ledger.policy.score_evaluations,
            perf_counter() - started,
            self._steps,
            least,
            chosen=self.ledger.evictions,
        )

    def _next(self, one: Instruction) -> None:
        facts = one.facts if isinstance(one, (Annotate, Call, Constant, Mutate, Release)) else None
        if not facts:
            return
        if isinstance(one, (Call, Mutate)):
            self._plain += _plain_cost(one)
            self.operators.run(one.operator, one.cost, facts)
        elif isinstance(one, Release):
            del self.contents[facts["storage"]]
        elif isinstance(one, Constant):
            self._constant(one.nbytes, facts)
        elif isinstance(one, Annotate) and one.text != START:
            _EVENTS[one.text](self, facts)

    def _constant(self, nbytes: int, facts: dict[str, Any]) -> None:
        elsewhere = facts["pin"] == "other device"
        foreign = facts["pin"] == "foreign memory"
        self.ledger.drain()  # before there is a stand-in that may get the identity of one that died
        content = Content(nbytes, "elsewhere" if elsewhere else "ours", not foreign)
        self.contents[facts["storage"]] = content
        record = self.ledger.adopt(content)
        record.pin = facts["pin"]
        record.exposed = facts["exposed"]

    def _totals(self) -> tuple[int, ...]:
        ledger, replay = self.ledger, self.replay
        scores = ledger.policy.score_evaluations
        return ledger.clock, self._plain, ledger.evictions, replay.rematerializations, scores

    def _state(self, facts: dict[str, Any]) -> None:
        restore(self.ledger, facts, self.contents)
        self.ledger.make_room(0, "set_budget")

    def _step(self, facts: dict[str, Any]) -> None:
        ledger = self.ledger
        ledger.end_step()
        now = self._totals()
        time, plain, *counts = (a - b for a, b in zip(now, self._before, strict=True))
        self._steps.append(Step(facts["step"], time, plain, ledger.step_peak_bytes, *counts))
        self._before = now
        ledger.step_peak_bytes = ledger.resident_bytes
        if ledger.policy.foresight is not None:
            ledger.policy.foresight.begin()
        if self.watched:
            self.watch()

    def _lock(self, facts: dict[str, Any]) -> None:
        self.ledger.drain()
        records = [self.operators.record(number) for number in facts["storages"]]
        self.replay.lock(records)
        self._locks[facts["lock"]] = records

    def _unlock(self, facts: dict[str, Any]) -> None:
        for record in self._locks.pop(facts["lock"], ()):
            record.locks -= 1

    def _pin(self, facts: dict[str, Any]) -> None:
        record = self.operators.record(facts["storage"])
        self.replay.lock([record])
        record.locks -= 1
        self.ledger.pin(record, facts["why"])

    def _expose(self, facts: dict[str, Any]) -> None:
        self.ledger.expose(self.operators.record(facts["storage"]), facts["why"])

    def _trust(self, facts: dict[str, Any]) -> None:
        self.operators.record(facts["storage"]).exposed = False

    def _outside(self, facts: dict[str, Any]) -> None:
        record = self.operators.record(facts["storage"])
        self.ledger.written_outside(record, facts["why"], exposes=facts["exposes"])

    def _resized(self, facts: dict[str, Any]) -> None:
        record = self.operators.record(facts["storage"])
        self.ledger.make_room(max(facts["bytes"] - record.nbytes, 0), "UntypedStorage.resize_")
        self.ledger.resized(record, facts["bytes"])

    def _compact(self, facts: dict[str, Any]) -> None:
        self.ledger.compact(facts["age"])

    def _period(self, facts: dict[str, Any]) -> None:
        self.ledger.end_period()

    def _restore(self, facts: dict[str, Any]) -> None:
        self.ledger.restore_all()

    def _failed(self, facts: dict[str, Any]) -> None:
        self.operators.failed(facts)


_EVENTS: dict[str, Callable[[_Run, dict[str, Any]], None]] = {
    "STATE": _Run._state,
    "STEP": _Run._step,
    "LOCK": _Run._lock,
    "UNLOCK": _Run._unlock,
    "PIN": _Run._pin,
    "EXPOSE": _Run._expose,
    "OUTSIDE": _Run._outside,
    "TRUST": _Run._trust,
    "RESIZED": _Run._resized,
    "COMPACT": _Run._compact,
    "PERIOD": _Run._period,
    "RESTORE": _Run._restore,
    "FAILED": _Run._failed,
}
