"""How a run with `--heuristic auto` begins, in the simulator: until it searches, against fixed heuristics.

    python -m tests.bench.start LOG… [--budgets 0.5,0.4,0.3,0.2] [--seeds 5]

LOG: of `dtrrun record --cost model --step 1-6`, from the first step on. The figures are a run's time as a
multiple of its own work: the median, the least and the most over seeds, with each of which the costs of
operators are changed by up to 10 percent. What takes more than five times its own work, or does not fit, is
counted as 5.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from math import exp, inf, log
from pathlib import Path
from statistics import median

from dtrrun.bindings import make_policy
from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Operation, Version
from dtrrun.core.heuristics import INITIAL, STEADY
from dtrrun.core.observer import DecisionObserver
from dtrrun.runtime.observe.learning import COMPARED, TOO_MUCH, TRIED, UNUSUAL, Trial
from dtrrun.runtime.observe.lookahead import KNOWN
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import Call, Instruction, Mutate, read_log
from tests.bench.replays import beginning

LIMIT = 5.0
NOISE = 0.1
RULES = {"h_dtr_eq": INITIAL, "steady": STEADY, "auto": INITIAL}


class Beginning(DecisionObserver):
    """Changes a run's rule as `observe.learning` does in its first steps."""

    def watch(self, dtr: DTR) -> None:
        self._ledger, self._ages = dtr.ledger, [dtr.ledger.age]
        self._spent = [(0, 0)]  # at the ends of steps: what the operators, and their recomputation, have cost
        self._last_ns = 0  # the latest step's own time
        self._begins, self._fled = True, False
        self._trial: Trial | None = None
        end_step = dtr.history.end_step

        def ended() -> None:
            end_step()
            self._ended()

        dtr.history.end_step = ended  # type: ignore[method-assign]
        dtr.ledger.decision_observers.append(self)

    def rematerialized(self, version: Version, operation: Operation, started_ns: int, cost_ns: int) -> None:
        own, recomputed = self._since(self._spent[-1])
        usual = self._share(min(len(self._spent) - 1, 2 * KNOWN)) if self._begins else 0.0
        if self._begins and recomputed >= max(TOO_MUCH, UNUSUAL * usual) * max(own, self._last_ns, 1):
            self._change(STEADY)
            self._trial = None if self._fled else Trial(TRIED, TOO_MUCH)
            self._fled = True

    def _since(self, before: tuple[int, int]) -> tuple[int, int]:
        recomputed = self._ledger.recomputed_cost
        return self._ledger.clock - recomputed - before[0], recomputed - before[1]

    def _share(self, steps: int) -> float:
        """Return the share of recomputation in the latest steps that are over."""
        (own_before, before), (own, recomputed) = self._spent[-1 - steps], self._spent[-1]
        return (recomputed - before) / max(own - own_before, 1)

    def _change(self, rule: str) -> None:
        self._begins = rule == INITIAL
        self._ledger.change_policy(make_policy(rule))

    def _ended(self) -> None:
        self._last_ns, _ = self._since(self._spent[-1])
        self._spent.append(self._since((0, 0)))
        self._ages.append(self._ledger.age)
        if self._begins and len(self._ages) == COMPARED + 1:
            _, before, second, third = self._ages
            if second - before == third - second:
                self._change(STEADY)
                self._trial = Trial(1, inf)
        if self._trial is not None:
            self._compare(self._trial)

    def _compare(self, trial: Trial) -> None:
        seen = min(len(self._spent) - 1, 2 * KNOWN)
        if trial.before is None:
            trial.before = self._share(1 if trial.least == 1 else seen)
            return
        trial.steps += 1
        if trial.steps < trial.least:
            return
        if 0 < trial.before <= self._share(min(trial.steps, seen)) < trial.most:
            self._change(INITIAL)
            self._trial = None


def noisy(instructions: Sequence[Instruction], seed: int) -> list[Instruction]:
    """Change the costs of operators, alike for calls of one operator that cost the same. Seed 0: none."""
    draw, factors = random.Random(seed), dict[tuple[str, int], float]()
    changed: list[Instruction] = []
    for one in instructions:
        if seed and isinstance(one, (Call, Mutate)):
            factor = factors.setdefault((one.operator, one.cost), 1 + draw.uniform(-NOISE, NOISE))
            one = one._replace(cost=int(one.cost * factor))
        changed.append(one)
    return changed


def overhead(instructions: Sequence[Instruction], budget_bytes: int, rule: str) -> float:
    with beginning(Beginning().watch if rule == "auto" else lambda _: None):
        outcome = predict(instructions, budget_bytes, RULES[rule], limit=LIMIT)
    return min(outcome.overhead, LIMIT) if outcome.status == "ok" else LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--budgets", default="0.5,0.4,0.3,0.2")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    means: dict[str, list[float]] = {rule: [] for rule in RULES}
    for path in given.logs:
        recorded = read_log(path)
        peak = max(step.peak_bytes for step in predict(recorded, None).steps[:2])
        logs = [noisy(recorded, seed) for seed in range(given.seeds)]
        for share in map(float, given.budgets.split(",")):
            found = {rule: sorted(overhead(one, int(peak * share), rule) for one in logs) for rule in RULES}
            if all(times[0] == LIMIT for times in found.values()):
                continue
            for rule, times in found.items():
                means[rule].append(median(times))
            shown = [f"{median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})" for times in found.values()]
            print(f"| {path.name.partition('.')[0]}, {share:.0%} | {' | '.join(shown)} |", flush=True)
    for rule, times in means.items():
        worse = sum(time > known + 0.01 for time, known in zip(times, means["h_dtr_eq"], strict=True))
        mean = exp(sum(map(log, times)) / len(times))
        print(f"{rule}: geometric mean {mean:.3f} of {len(times)} cells, {worse} worse than h_dtr_eq by 0.01")


if __name__ == "__main__":
    main()
