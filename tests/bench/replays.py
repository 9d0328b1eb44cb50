"""What a heuristic recomputes in dtrrun's own semantics, and what each part of these semantics contributes.

    python -m tests.bench.replays [--heuristic NAME] [--budgets 0.5,0.4] [--parts]

On the kept logs of the examples. Without --parts: for each log and budget the overhead, the share of the
costliest rematerialization in all recomputation, and how many operators it runs, of how many distinct ones.
With --parts: the overhead with one part of the semantics switched off at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Operation, Version
from dtrrun.core.heuristics import make_heuristic
from dtrrun.core.ledger import Ledger
from dtrrun.core.observer import DecisionObserver
from dtrrun.simulator import live
from dtrrun.simulator.live import Prediction, predict, watched_steps
from dtrrun.simulator.log import read_log

LOGS = sorted(Path(__file__).parents[1].joinpath("logs").glob("*.log.gz"))
LIMIT = 4.0

PARTS: dict[str, tuple[str, str, int] | None] = {
    "as it is": None,
    "no kept inputs": ("deallocation", "kept", 1 << 62),
    "no scratch is kept": ("deallocation", "scratch_shift", 62),
    "all scratch is kept": ("deallocation", "scratch_shift", 0),
    "no plans": ("rematerializer", "last_planned", 1 << 30),
    "dear ones by their score": ("eviction", "dear_part", 0),
}
"""By name: a part of a `DTR`, its attribute and the value to set."""


class Costliest(DecisionObserver):
    """The costliest of the rematerializations that the program's operators needed."""

    def __init__(self) -> None:
        self.cost = self.total = self.runs = 0
        self.distinct: set[tuple[str, int, int]] = set()
        self._ledger: Ledger | None = None
        self._age = self._cost = 0
        self._seen: list[tuple[str, int, int]] = []

    def rematerialized(self, version: Version, operation: Operation, started_ns: int, cost_ns: int) -> None:
        assert self._ledger is not None
        if self._ledger.age != self._age:  # for another operator
            self._age, self._cost = self._ledger.age, 0
            self._seen = []
        self._seen.append((operation.signature.operator.name, version.age, version.mutations))
        self._cost += operation.signature.cost
        self.total += operation.signature.cost
        if self._cost > self.cost:
            self.cost, self.runs, self.distinct = self._cost, len(self._seen), set(self._seen)

    def watch(self, dtr: DTR) -> None:
        self._ledger = dtr.ledger
        dtr.ledger.decision_observers.append(self)


@contextmanager
def beginning(begins: Callable[[DTR], None]) -> Iterator[None]:
    """Call a function with each run's parts before the run begins."""
    begin = live._Run.__init__

    def begun(run: Any, *given: Any, **named: Any) -> None:
        begin(run, *given, **named)
        begins(run.dtr)

    with patch.object(live._Run, "__init__", begun):
        yield


def without(part: tuple[str, str, int] | None) -> Callable[[DTR], None]:
    """Return a function that switches this part of a run off."""
    return lambda dtr: None if part is None else setattr(getattr(dtr, part[0]), part[1], part[2])


def cells(heuristic: str, ratios: list[float]) -> Iterator[tuple[str, list[Callable[[], Prediction]]]]:
    """Yield each log's name, and a function for each budget that predicts it."""
    for path in LOGS:
        log = read_log(path)
        peak = predict(log, None).peak_bytes
        steps = watched_steps(log) if make_heuristic(heuristic).foresight else []
        predictions = [
            partial(predict, log, int(peak * ratio), heuristic, limit=LIMIT, watched=partial(list, steps))
            for ratio in ratios
        ]
        yield path.name.partition(".")[0], predictions


def shown(outcome: Prediction) -> str:
    return f"{outcome.overhead:.2f}" if outcome.status == "ok" else outcome.status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heuristic", default="h_dtr_eq")
    parser.add_argument("--budgets", default="0.7,0.5,0.4,0.3,0.2")
    parser.add_argument("--parts", action="store_true")
    given = parser.parse_args()
    ratios = [float(one) for one in given.budgets.split(",")]
    for name, predictions in cells(given.heuristic, ratios):
        if not given.parts:
            for ratio, prediction in zip(ratios, predictions, strict=True):
                costliest = Costliest()
                with beginning(costliest.watch):
                    outcome = prediction()
                share = costliest.cost / max(costliest.total, 1)
                runs = f"{costliest.runs} operators, {len(costliest.distinct)} distinct"
                print(f"{name}, {ratio}: {shown(outcome)}; {share:.0%} in one, {runs}", flush=True)
            continue
        for part, value in PARTS.items():
            with beginning(without(value)):
                found = [shown(prediction()) for prediction in predictions]
            print(f"| {name} | {part} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
