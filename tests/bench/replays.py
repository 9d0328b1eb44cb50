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
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dtrrun.core import deallocation, rematerialize
from dtrrun.core.heuristics import make_heuristic
from dtrrun.simulator.live import Prediction, predict, watched_steps
from dtrrun.simulator.log import read_log

LOGS = sorted(Path(__file__).parents[1].joinpath("logs").glob("*.log.gz"))
LIMIT = 4.0

PARTS: dict[str, list[Any]] = {
    "as it is": [],
    "no kept inputs": [patch.object(deallocation, "KEPT", inf)],
    "no scratch is kept": [patch.object(deallocation, "SCRATCH_SHIFT", 62)],
    "all scratch is kept": [patch.object(deallocation, "SCRATCH_SHIFT", 0)],
    "no plans": [patch.object(rematerialize, "LAST_PLANNED", inf)],
}


class Costliest:
    """The rematerialization that took most, of all that the program asked for."""

    def __init__(self) -> None:
        self.cost = self.total = self.runs = 0
        self.distinct: set[tuple[str, int, int]] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        one = rematerialize.Rematerializer
        materialize, run = one._materialize, one._run
        seen: list[tuple[str, int, int]] = []

        def materializing(parts: Any, targets: Any) -> None:
            seen.clear()
            before = parts._ledger.clock
            try:
                materialize(parts, targets)
            finally:
                cost = parts._ledger.clock - before
                self.total += cost
                if cost > self.cost:
                    self.cost, self.runs, self.distinct = cost, len(seen), set(seen)

        def running(parts: Any, wanted: Any, operation: Any) -> None:
            run(parts, wanted, operation)
            seen.append((operation.signature.operator.name, wanted.age, wanted.mutations))

        with patch.object(one, "_materialize", materializing), patch.object(one, "_run", running):
            yield


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
                with costliest.watched():
                    outcome = prediction()
                share = costliest.cost / max(costliest.total, 1)
                runs = f"{costliest.runs} operators, {len(costliest.distinct)} distinct"
                print(f"{name}, {ratio}: {shown(outcome)}; {share:.0%} in one, {runs}", flush=True)
            continue
        for part, patches in PARTS.items():
            for one in patches:
                one.start()
            found = [shown(prediction()) for prediction in predictions]
            for one in patches:
                one.stop()
            print(f"| {name} | {part} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
