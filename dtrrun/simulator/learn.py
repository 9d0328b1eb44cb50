"""Finds the heuristic that suits a program by replaying its latest steps, in a separate process.

    python -c "…; from dtrrun.simulator.learn import main; main()" '{"log": …, "answer": …, …}'

A rule with foresight knows only the first steps of the log, and is judged by the others. Where steps differ,
a rule that knew the steps it is judged by would win here, but lose in the run. Standard library only, since
it runs in the target's interpreter.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from dtrrun.core.chain import Settings, parse
from dtrrun.core.foresight import WatchedStep

from .costs import costs_of
from .live import predict, watched_steps
from .log import Instruction, LogError, read_log
from .portfolio import find
from .replay import ReplayOutcome

STARTS = (
    Settings("ancestors", 0.0, 1.0, False).name,
    "size",
    Settings("ancestors", 0.2, 1.5, False).name,
    Settings("ancestors", 0.2, 1.0, False).name,
    "h_next",
    "h_dtr_eq",
    Settings("e_star", 0.5, 1 / 3).name,
    Settings("e_star", 0.5, 1.5, False).name,
    Settings("e_star", 0.2, 1.0, False).name,
    Settings("ancestors", 0.2, 0.5, False).name,
    "h_chain",
)
"""Ordered so that each next one gains the most (`docs/design/auto.md`)."""
LIMIT = 10.0
"""Reject a rule that takes more than this multiple of the plain time."""
TIGHTER = 0.97
"""If the present rule runs in this share of the budget, the one found must too: a step may need more."""
EVERY = 0.5
"""Seconds between checks of the time and of whether the program still runs."""
SPARE = 0.1
"""Extra recomputation, as a share of the plain time, allowed for the steps that are not judged."""


class Wanted(NamedTuple):
    """log, answer: files. budget_bytes: for tensors. known: number of steps that a rule with foresight knows.

    present: the rule that the log was made with. seconds, memory_bytes: limits of this search.
    """

    log: str
    answer: str
    budget_bytes: int
    known: int
    present: str
    seconds: float
    memory_bytes: int


class Judge:
    """Replays the log with a rule, and judges only the last steps."""

    def __init__(self, instructions: Sequence[Instruction], wanted: Wanted) -> None:
        self._instructions, self._wanted = instructions, wanted
        self.steps: list[WatchedStep] = watched_steps(instructions, wanted.log)
        """All steps of the log, including the last ones."""

    def runs_in_less(self, heuristic: str) -> bool:
        """Return whether a slightly smaller budget would be enough."""
        known, budget = self._wanted.known, int(self._wanted.budget_bytes * TIGHTER)
        steps = self.steps[:known]
        found = predict(self._instructions, budget, heuristic, limit=LIMIT, watched=lambda: steps)
        return found.status == "ok"

    def __call__(self, heuristic: str, *, limit: float) -> ReplayOutcome:
        known = self._wanted.known
        found = predict(
            self._instructions,
            self._wanted.budget_bytes,
            heuristic,
            limit=limit + SPARE,
            watched=lambda: self.steps[:known],
            name=self._wanted.log,
        )
        judged = found.steps[known:]
        if found.status != "ok" or not judged:
            return replace(found, status="thrash" if found.status == "ok" else found.status)
        time, plain = sum(one.time for one in judged), sum(one.plain_time for one in judged)
        status = "ok" if time <= limit * plain else "thrash"
        return replace(found, status=status, time=time, plain_time=plain)


def search(wanted: Wanted) -> None:
    """Write each better rule to the answer file as it is found. Raises LogError, OSError."""
    started = perf_counter()
    log = read_log(wanted.log)
    judge = Judge(log, wanted)
    present = judge(wanted.present, limit=LIMIT)
    spare = present.status == "ok" and judge.runs_in_less(wanted.present)
    answer: dict[str, Any] = {
        "present": wanted.present,
        "present_overhead": present.overhead if present.status == "ok" else None,
        "heuristic": wanted.present,
        "overhead": present.overhead if present.status == "ok" else None,
        "steps": [],
        "costs": costs_of(log),
    }
    tried = 0

    def write(ended: bool) -> None:
        facts = {"tried": tried, "seconds": perf_counter() - started, "ended": ended}
        _write(wanted.answer, answer | facts)

    def replay(heuristic: str, *, limit: float) -> ReplayOutcome:
        nonlocal tried
        tried += 1
        if heuristic == wanted.present:
            return present
        found = judge(heuristic, limit=limit)
        if found.status == "ok" and spare and not judge.runs_in_less(heuristic):
            return replace(found, status="oom")
        return found

    def better(heuristic: str, outcome: ReplayOutcome) -> None:
        settings = parse(heuristic)
        looks_ahead = settings is not None and settings.next > 0
        newest = judge.steps[wanted.known : 2 * wanted.known] if looks_ahead else ()
        answer.update(
            heuristic=heuristic, overhead=outcome.overhead, steps=[step.to_values() for step in newest]
        )
        write(ended=False)

    try:
        limit = min(LIMIT, present.overhead) if present.status == "ok" else LIMIT
        find(replay, limit=limit, starts=(wanted.present, *STARTS), tell=better)
    except (TimeoutError, MemoryError):
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    write(ended=True)


def _write(path: str, answer: dict[str, Any]) -> None:
    """Replace the file atomically, in a folder that only we can access."""
    with open(f"{path}.part", "w") as file:
        json.dump(answer, file)
    os.replace(f"{path}.part", path)


def main() -> None:
    wanted = Wanted(**json.loads(sys.argv[1]))
    started = perf_counter()

    def look(_number: int, _frame: object) -> None:
        if select.select([sys.stdin], [], [], 0)[0]:  # closed: the program has ended, or was killed
            shutil.rmtree(os.path.dirname(wanted.log), ignore_errors=True)
            os._exit(1)
        if perf_counter() - started >= wanted.seconds:
            raise TimeoutError("the logged steps are too long")  # TimeoutError is an OSError

    os.nice(19)
    bound = wanted.memory_bytes
    with suppress(OSError, ValueError):  # a lower limit may be set already
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(wanted.seconds, EVERY), EVERY)
    try:
        search(wanted)
    except (LogError, OSError, MemoryError) as error:
        with suppress(OSError):
            _write(wanted.answer, {"error": str(error) or type(error).__name__})
