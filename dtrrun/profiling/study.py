"""The stages of `dtrrun profile`: plain runs, predictions, checks by real runs. Keeps results so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtrrun.core.host import NEVER, HostMemory, default_folder, expected_host
from dtrrun.profiling.costs import write_costs
from dtrrun.profiling.curve import Curve, Point
from dtrrun.profiling.files import file_costs
from dtrrun.profiling.forecast import Model, scale_of
from dtrrun.profiling.knee import knee, within
from dtrrun.profiling.room import budget_for
from dtrrun.profiling.search import certified, find_minimum, least
from dtrrun.profiling.trial import OK, THRASH, Trial, run_trial
from dtrrun.settings import RuntimeSettings
from dtrrun.simulator.costs import costs_of, settled
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import read_log
from dtrrun.sizes import AUTO_HOST, NO_HOST, parse_host

PATIENCE = 18.0
"""Time limit as a multiple of a plain run's time; checks still to do by then are omitted."""
SIMULATING = 3.0
"""The simulator's share of `PATIENCE`."""
LEAST_PEAK = 1_000_000
AMPLE = 1 << 50
"""Bytes, assumed of a machine whose memory on the host is not known here: its runs tell."""


class NothingToProfile(Exception):
    """Raised when there is nothing to profile, with the reason."""


class ScriptFailed(Exception):
    """Raised when the program fails without a budget, or with the least value of `--vary`."""

    def __init__(self, trial: Trial) -> None:
        super().__init__("the program itself fails")
        self.trial = trial


class OutOfPatience(Exception):
    """Raised when the time limit would be exceeded."""


@dataclass
class Study:
    """What is known about a program so far.

    settings: common to all runs. limit: a step that takes more than this multiple of its own work is
    thrashing, so its budget does not work. checks: number of budgets on the curve to run. attend: called
    repeatedly.
    """

    command: Sequence[str]
    settings: RuntimeSettings
    folder: Path
    steps: int = 3
    heuristics: Sequence[str] = ("h_dtr_eq", "h_chain")
    limit: float = 3.0
    checks: int = 4
    max_slowdown: float | None = None
    attend: Callable[[Study], None] = lambda _: None

    now: str = ""
    """The current activity."""
    left: float | None = None
    """Estimated remaining seconds."""
    plain: Trial | None = None
    curve: Curve | None = None
    points: dict[int, Point] = field(default_factory=dict)
    worked: dict[int, bool] = field(default_factory=dict)
    """Budgets that were run, and whether they worked."""
    recommended: int | None = None
    complete: bool = False
    """True once all is done, with nothing omitted for lack of time."""
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    _to_check: int = 6
    """Expected number of remaining runs."""

    # -- what has been found -----------------------------------------------------------------------

    @property
    def peak(self) -> int:
        """The least budget that evicts nothing: the tensors' peak, plus the overhead on a GPU."""
        assert self.plain is not None
        return budget_for(self.plain.peak_bytes, self.plain.overhead_bytes)

    @property
    def minimum(self) -> int | None:
        return least(self.worked)

    @property
    def certified(self) -> bool:
        """Whether the minimum is certain: a run with a budget at most 5 % lower failed."""
        return certified(self.worked)

    @property
    def reserve(self) -> int | None:
        """The part of the peak that a session on a GPU keeps free; None on the CPU."""
        assert self.plain is not None
        if self.plain.overhead_bytes is None:
            return None
        return self.peak - self.plain.peak_bytes - self.plain.overhead_bytes

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    # -- stages ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run everything. Raises ScriptFailed, NothingToProfile, LaunchError; earlier results are kept."""
        try:
            self._measure()
            self._record()
            guess = self._predict()
            try:
                self._check_curve(guess)
                find_minimum(self._works, guess, self.peak, self.worked)
                self._recommend()
                self.complete = True
            except OutOfPatience:
                self.recommended = self._wanted(measured=True)
        except KeyboardInterrupt:
            if self.worked:
                self.recommended = self._wanted(measured=True)
            raise
        finally:
            self.ended = time.monotonic()

    def _measure(self) -> None:
        self.now = "a run without a budget"
        plain = self._trial(replace(self.settings, max_steps=self.steps), math.inf)
        if plain.status != OK:
            raise ScriptFailed(plain)
        if not plain.steps:
            raise NothingToProfile("the program made no optimizer step, and profile measures steps")
        self.steps = min(self.steps, plain.steps[-1].number)
        if plain.peak_bytes < LEAST_PEAK:
            raise NothingToProfile(
                f"its tensors take at most {plain.peak_bytes:,} bytes, too little to save anything"
            )
        self.plain = plain

    def _record(self) -> None:
        assert self.plain is not None
        self.now = "a run that is recorded"
        path = self.folder / "steps.log"
        settings = replace(
            self.settings,
            max_steps=self.steps,
            log=str(path),
            log_first=1,
            log_last=self.steps,
            log_rank=self.plain.largest_rank,  # the others need less
        )
        trial = self._trial(settings, 20 * self.plain.seconds + 60)
        if not path.exists():
            if trial.status != OK:
                raise ScriptFailed(trial)
            if trial.log_error:
                folder = path.parent.parent
                raise NothingToProfile(f"its operators cannot be recorded in {folder}: {trial.log_error}")
            raise NothingToProfile(f"the {self.steps} steps could not be recorded: the next run had fewer")
        log = read_log(path)
        costs = costs_of(log)
        log = settled(log, costs)
        host = self._host()
        write_costs(self.costs_path, log, costs, host)
        model = Model(self.plain.steps, scale_of(self.plain.steps, predict(log, None).steps))
        self.curve = Curve(
            log,
            model,
            self.settings,
            self.heuristics,
            self.limit,
            lambda: self.attend(self),
            self.plain.overhead_bytes,
            host,
        )

    def _host(self) -> HostMemory | None:
        """Return where tensors may leave for in runs with a budget; None if they stay."""
        assert self.plain is not None
        budget, on_gpu = self.settings.host_budget, self.plain.overhead_bytes is not None
        if budget == NO_HOST or (budget == AUTO_HOST and not on_gpu):
            return None
        if budget == AUTO_HOST:
            return expected_host(AMPLE, "cuda", NEVER)
        nbytes, folder = parse_host(budget)
        return (
            expected_host(nbytes, "cuda")
            if on_gpu
            else HostMemory(nbytes, *file_costs(folder or default_folder()))
        )

    def _predict(self) -> int:
        """Predict the curve. Returns the least budget predicted to work."""
        assert self.plain is not None
        assert self.curve is not None
        self.now = "predicting the curve"
        guess = self.curve.sweep(self.peak, SIMULATING * self.plain.seconds)
        self.points |= {budget: self.curve.best(budget) for budget in self.curve.swept}
        return guess

    @property
    def costs_path(self) -> Path:
        return self.folder / "costs.gz"

    # -- real runs ---------------------------------------------------------------------------------

    def _works(self, budget: int) -> bool:
        """Run the program within this budget. Returns whether it works."""
        assert self.plain is not None
        assert self.curve is not None
        point = self.points[budget] = self.curve.best(budget)
        if (
            self.seconds + self.plain.seconds * (point.predicted.slowdown or 2)
            > PATIENCE * self.plain.seconds
        ):
            raise OutOfPatience
        self.now = f"{100 * budget / self.peak:.0f} % of the peak"
        settings = replace(
            self.settings,
            max_steps=self.steps,
            budget_bytes=budget,
            heuristic=point.heuristic,
            costs=str(self.costs_path),
            max_slowdown=self.limit,
            on_thrash="stop",
        )
        trial = self._trial(settings, (self.limit + 2) * self.plain.seconds + 30)
        if trial.status == OK and (trial.slowdown or 1.0) > self.limit:
            trial = replace(trial, status=THRASH)
        point.trial = trial
        if trial.status == OK:
            self.curve.learn(point, trial.steps)
        self.worked[budget] = trial.status == OK
        return trial.status == OK

    def _check_curve(self, guess: int) -> None:
        """Run budgets that should work, largest first: evenly spread, and the one to recommend so far."""
        budgets = sorted(budget for budget in self.points if guess <= budget < self.peak)
        if not budgets:
            return
        wanted = {
            guess + (self.peak - guess) * place // (self.checks + 1) for place in range(1, self.checks + 1)
        }
        chosen = {min(budgets, key=lambda one: abs(one - budget)) for budget in wanted}
        best = self._wanted()
        if best is not None and best in budgets:
            chosen.discard(min(chosen, key=lambda one: abs(one - best)))
            chosen.add(best)
        self._to_check = len(chosen) + 2
        for budget in sorted(chosen, reverse=True):
            self._works(budget)

    def _wanted(self, *, measured: bool = False) -> int | None:
        """Return the budget to recommend so far. measured: only consider those that were run."""
        floor = self.minimum if self.worked else None
        curve = {
            budget: slowdown
            for budget, point in self.points.items()
            if (slowdown := point.slowdown) is not None
            and (floor is None or budget >= floor)
            and (not measured or point.trial is not None)
        }
        if self.worked and floor is None:
            return None
        if not curve:
            return None
        if self.max_slowdown is not None:
            return within(curve, self.max_slowdown)
        if not measured:
            curve[self.peak] = 1.0
        best = knee(curve)
        return best if best < self.peak else None

    def _recommend(self) -> None:
        """Ensure that the recommended budget has been run."""
        assert self.curve is not None
        while True:
            for budget, point in self.points.items():  # runs since then corrected the predictions
                if point.trial is None:
                    self.points[budget] = self.curve.best(budget)
            wanted = self._wanted()
            if wanted is None or wanted in self.worked:
                self.recommended = wanted
                return
            if not self._works(wanted):
                find_minimum(self._works, wanted, self.peak, self.worked)

    def _trial(self, settings: RuntimeSettings, patience: float) -> Trial:
        begin = time.monotonic()

        def attend() -> None:
            if self.plain is not None:
                expected = 1.5 * self.plain.seconds * max(self._to_check, 1)
                self.left = max(expected - (time.monotonic() - begin), 0.0)
            self.attend(self)

        trial = run_trial(settings, self.command, patience, attend)
        if self.plain is not None:
            self._to_check -= 1
        return trial
