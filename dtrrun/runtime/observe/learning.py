"""`--heuristic auto`: finds the heuristic that suits the program while it trains, and switches to it.

The run begins with a heuristic that does well in general, or with what an earlier run has found. When steps
recompute more than a little, some of them are logged, and another process tries heuristics on the log
(`simulator.learn`) while training goes on. At the end of a step, the session switches to what was found, and
back if that is worse. All of this happens again when the steps change. The values that the program computes
depend on none of it. In this code, a rule is a heuristic with its settings.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

from dtrrun.core.foresight import WatchedStep
from dtrrun.core.heuristics import FIRST
from dtrrun.runtime.costs import costs_from
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.observe.lookahead import KNOWN, Lookahead
from dtrrun.runtime.observe.recorder import Recorder
from dtrrun.runtime.observe.remembered import Remembered
from dtrrun.runtime.observe.steps import StepClock

WORTH = 0.02
"""A share of the program's own operators: neither is less recomputation worth a search, nor a lesser saving a
change."""
PAID = 2.0
"""Recomputation since the beginning, in steps without any, from which a search is worth its price: about what
logging the steps costs. So a short run, or one that recomputes next to nothing, does without. Each further
search has to be worth twice as much as the one before."""
JUDGED = 4
"""Steps (or more, if several kinds of steps alternate) by which a rule is judged. Before the first are over,
costs have not been measured, and there is no optimizer's state."""
WORSE = 0.01
"""By how much the share of a new rule may be worse than that of the former."""
BROKEN = 1.25
"""By what factor (and twice `WORTH`) a share may become worse than it was, in this run or the one that is
remembered, before another search."""
VARYING = "h_dtr_eq"
"""For a program in which no step is like another: what was best for some of its steps is not for the next."""
HOPELESS = 3.0
"""Recomputation in a step, relative to its own operators, from which another rule is tried at once."""
AT_ONCE_NS = 1_000_000_000
"""Less recomputation is not worth that."""
OTHERS = ("h_next", VARYING, FIRST)
"""Rules that are tried then, each once, and the last of them in any case."""
MOST_OPERATORS = 100_000
"""Of the steps to be logged: more would take the search too long."""
SECONDS = 30.0
LONGEST = 20
MEMORY_BYTES = 4 << 30
"""Bounds on the search: seconds, or steps where these take longer; and memory."""
START = (
    "import os, sys; os.fork() and os._exit(0); sys.path.insert(0, sys.argv.pop(1)); "
    "from dtrrun.simulator.learn import main; main()"
)
"""It is not our child: a program may wait for any child (`os.wait`), and count them."""


class Session(Protocol):
    slow_path: SlowPath
    steps: StepClock

    def change_heuristic(self, name: str) -> None: ...

    def warn(self, text: str) -> None: ...


class Learning:
    """Watches steps, has rules searched, and changes the session's rule."""

    def __init__(
        self, session: Session, remembered: Remembered | None = None, folder: str | None = None
    ) -> None:
        """remembered: where earlier runs have left what they found, and this one leaves it; None: nowhere.

        folder: for the log, removed even if this process is killed; None: the one for temporary files.
        """
        self._session, self._remembered, self._folder = session, remembered, folder
        self._dtr = session.slow_path.dtr
        self._ledger = session.slow_path.ledger
        self._lookahead: Lookahead | None = None
        self._recorder: Recorder | None = None
        self._search: Search | None = None
        self._ages: deque[int] = deque(maxlen=2 * KNOWN + 1)  # at the ends of the latest steps
        self._shares: deque[float] = deque(maxlen=2 * KNOWN)  # recomputation in steps with the present rule
        self._skip = 0  # steps that belong to two rules
        self._recomputed = 0.0  # the sum of all shares since the last search
        self._paid = PAID  # by which the next one is worth its price
        self._tolerated = WORTH  # the share up to which there is none
        self._kinds = 1  # of steps, which alternate
        self._judged = True  # whether the present rule needs no judgement any more
        self._promised: float | None = None  # its share in the run that is remembered
        self._former: float | None = None  # the share before the search
        self._found: dict[str, Any] = {"heuristic": FIRST, "steps": []}  # the present rule
        self._previous = self._found  # that of `_former`
        self._costs: dict[str, Any] = {}  # of operators, with which the present rule was found
        self._untried = list(OTHERS)
        self._changed_in = 0  # the step within which the rule was changed last
        self._recomputed_before = 0  # ns, in that step until then
        self.rule: dict[str, Any] = {"heuristic": FIRST, "since_step": 1, "source": "first"}
        """What is told of the present rule: shares are of the program's own operators."""

    def install(self) -> None:
        found = None if self._remembered is None else self._remembered.read()
        if found is None:
            return
        try:
            costs = costs_from(found["costs"])
            self._change(found, "remembered")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return  # it was not written by us, or by another version
        # What suits a program depends on what its operators seem to cost, and that differs from run to run.
        self._costs = found["costs"]
        self._session.slow_path.signatures.expect(costs)
        self._judged = False
        self._promised = found["overhead"] - 1

    def remove(self) -> None:
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None
        self._end_search()

    def forget(self) -> None:
        """The budget is too small, perhaps because of the present rule: no run begins with it again."""
        if self._remembered is not None:
            self._remembered.forget()

    # -- steps -----------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """Called when the step is over, and its figures are known."""
        self._ages.append(self._ledger.age)
        if self._lookahead is not None:
            self._lookahead.step_ended()
        self._note(self._session.steps.last)
        if self._recorder is not None:
            self._recorder.step_ended()
            if self._recorder.ended:
                self._logged()
        elif self._search is not None:
            self._look()
        elif not self._judged:
            self._judge()
        else:
            self._consider()

    def step_goes_on(self, step: dict[str, int]) -> None:
        """Called from time to time within a step, also within a rematerialization. step: its figures so far.

        If it is mostly recomputation, another rule takes over at once: better ones are learned at the ends of
        steps, and this one's may be ages away.
        """
        recomputed = step["rematerialization_ns"]
        if self._changed_in == step["index"]:
            recomputed -= self._recomputed_before
        own = max(step["operators_ns"], (self._session.steps.last or step)["operators_ns"])
        if not self._untried or recomputed < max(AT_ONCE_NS, HOPELESS * own):
            return
        if self.rule["source"] == "remembered":
            self.forget()
        self._changed_in, self._recomputed_before = step["index"], step["rematerialization_ns"]
        present = self._found["heuristic"]
        while self._untried:
            name = self._untried.pop(0)
            if name != present:
                with self._session.slow_path.lock:
                    self._change({"heuristic": name, "steps": []}, "thrashing")
                self._judged, self._former, self._promised = True, None, None
                return

    def _note(self, step: dict[str, int] | None) -> None:
        if step is None or self._recorder is not None:
            return
        if self._skip:
            self._skip -= 1
            return
        self._shares.append(step["rematerialization_ns"] / max(step["operators_ns"], 1))
        self._recomputed += self._shares[-1]

    @property
    def _share(self) -> float | None:
        """Recomputation with the present rule: the median of each kind of steps, and of these the mean.

        None if there were too few steps.
        """
        kinds = self._kinds
        wanted = -(-JUDGED // kinds) * kinds
        if len(self._shares) < wanted:
            return None
        latest = list(self._shares)[-wanted:]
        return mean(median(latest[kind::kinds]) for kind in range(kinds))

    # -- searching -------------------------------------------------------------------------------

    def _consider(self) -> None:
        """Log the next steps, if that is worth it."""
        share = self._share
        if share is None or share < self._tolerated or self._recomputed < self._paid:
            return
        operators = [after - before for before, after in pairwise(self._ages)]
        kinds = kinds_of(operators)
        if kinds is None:
            return
        self._recomputed, self._paid = 0.0, 2 * self._paid
        self._kinds, self._judged, self._former = max(kinds, 1), False, None
        if not kinds:
            if self._found["heuristic"] != VARYING:
                self._take({"heuristic": VARYING, "steps": []}, "varying")
            return
        if 2 * sum(operators[-kinds:]) > MOST_OPERATORS:
            return
        try:
            folder = tempfile.mkdtemp(prefix="dtrrun-", dir=self._folder)
        except OSError as error:
            self._cannot(error.strerror)
            return
        self._search = Search(Path(folder), self._kinds)
        self._recorder = recorder = Recorder(str(self._search.log), 1, 2 * kinds, "measured", alone=False)
        recorder.connect(self._session.slow_path)
        recorder.step_begins()
        if recorder.ended:
            self._logged()

    def _logged(self) -> None:
        """The steps are logged: start the search."""
        assert self._recorder is not None
        assert self._search is not None
        error, self._recorder = self._recorder.error, None
        try:
            if error is not None:
                raise OSError(0, error)
            if not sys.executable:
                raise OSError(0, "no Python interpreter was found")
            last = self._session.steps.last  # it was logged, so there is one
            seconds = max(SECONDS, LONGEST * last["wall_ns"] / 1e9) if last else SECONDS
            self._search.start(self._ledger.limit, self._found["heuristic"], seconds)
        except OSError as error:
            self._cannot(error.strerror)

    def _look(self) -> None:
        """See what the search has found so far."""
        assert self._search is not None
        running = self._search.running()  # first, so that no answer comes after this
        answer = self._search.answer()
        if answer is not None and "error" in answer:
            self._cannot(answer["error"])
            return
        if answer is not None:
            self._costs = answer["costs"]
        if answer is not None and answer["heuristic"] != self._found["heuristic"]:
            # The figures of one search can be compared, but not with what was measured.
            present = answer["present_overhead"] if self._former is None else self.rule["predicted"]
            if present is None or present - answer["overhead"] > WORTH:
                self._take(answer, "searched")
        if not running:
            if not self._search.whole:
                self._cannot("the search was killed")
            self._end_search()

    def _take(self, found: dict[str, Any], source: str) -> None:
        """Change to what was found, and keep what there was, to change back to."""
        if self._former is None:
            self._former, self._previous = self._share, self._found
        self._change(found, source)

    def _change(self, found: dict[str, Any], source: str) -> None:
        """Let another rule choose from now on."""
        steps = [WatchedStep.from_values(values) for values in found["steps"]]
        if self._lookahead is not None:
            self._lookahead.end()
            self._lookahead = None
        self._session.change_heuristic(str(found["heuristic"]))
        if self._ledger.policy.heuristic.foresight:
            self._lookahead = Lookahead(self._session.slow_path, steps)
        self._shares.clear()
        self._skip = 1
        self.rule = {
            "heuristic": found["heuristic"],
            "since_step": self._session.steps.count + 1,
            "source": source,
            "predicted": found.get("overhead"),
            "predicted_before": found.get("present_overhead"),
        }
        self._found = found
        self._kinds = max(len(steps), 1) if source == "remembered" else self._kinds

    def _judge(self) -> None:
        """Compare the present rule with the one before, or with its promise, once."""
        share = self._share
        if share is None:
            return
        self._judged = True
        self.rule["share"], self.rule["share_before"] = share, self._former
        expected, self._promised = self._promised, None
        if expected is None:
            if self._former is not None and share > self._former + WORSE:
                self._back()
            expected = self.rule["share"]
            if self._remembered is not None:
                self._remembered.write(self._found | {"overhead": 1 + expected, "costs": self._costs})
        self._tolerated = BROKEN * expected + 2 * WORTH

    def _back(self) -> None:
        """The new rule is worse than the former."""
        self._change(self._previous, "worse")
        self.rule["share"] = self._former

    def _cannot(self, why: str | None) -> None:
        self._session.warn(CANNOT.format(heuristic=self._found["heuristic"], why=why or "unknown"))
        self._end_search()

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.end()
            self._search = None


CANNOT = "cannot search for a better heuristic ({why}): the run keeps {heuristic}"


def kinds_of(operators: Sequence[int]) -> int | None:
    """Return how many kinds of steps alternate, 0 if none are alike; None if more steps have to be seen.

    operators: the number of operators of each of the latest steps.
    """
    for kinds in range(1, KNOWN + 1):
        if len(operators) >= max(2 * kinds, 3) and operators[kinds:] == operators[:-kinds]:
            return kinds
    if len(operators) < 2 * KNOWN:
        return None
    most = max(map(operators.count, operators))  # others may differ: an evaluation, a line in a log
    return 1 if 2 * most >= len(operators) else 0


class Search:
    """The other process, its log and its answer, in a folder of their own."""

    def __init__(self, folder: Path, known: int) -> None:
        self._folder, self._known = folder, known
        self.log, self._answer = folder / "steps.log", folder / "answer.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._read_ns = 0
        self.whole = False
        """Whether the last answer was read."""
        self._pid = os.getpid()

    def start(self, budget_bytes: int, present: str, seconds: float) -> None:
        """Raises OSError."""
        wanted = {
            "log": str(self.log),
            "answer": str(self._answer),
            "budget_bytes": budget_bytes,
            "known": self._known,
            "present": present,
            "seconds": seconds,
            "memory_bytes": MEMORY_BYTES,
        }
        package = str(Path(__file__).resolve().parents[3])
        command = [sys.executable, "-I", "-S", "-c", START, package, json.dumps(wanted)]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=quiet, start_new_session=True
        )
        self._process.wait()  # for the one that has forked

    def running(self) -> bool:
        """It writes nothing, so that its output can only be read from once it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        return not poll.poll(0)

    def answer(self) -> dict[str, Any] | None:
        """Return the best so far, if it is new."""
        try:
            written = os.stat(self._answer).st_mtime_ns
            if written == self._read_ns:
                return None
            self._read_ns = written
            found: dict[str, Any] = json.loads(self._answer.read_text())
        except (OSError, ValueError):
            return None
        self.whole = bool(found.get("ended"))
        return found

    def end(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child, to which none of this belongs
        for pipe in (self._process.stdin, self._process.stdout) if self._process is not None else ():
            if pipe is not None:
                pipe.close()  # by which it ends
        shutil.rmtree(self._folder, ignore_errors=True)
