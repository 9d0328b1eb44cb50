"""The cost of one eviction decision, by scan and by heap: python -m tests.bench.bench_policy [heuristic …]

An endless program is played to the policy: each operator reads one of the last results, and now and then
an older one, which is rematerialized if it was evicted; each result is dropped after a while. The pool
keeps its size, so every new result evicts one storage.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from typing import Any

from dtrrun.bindings import make_policy
from dtrrun.core.backend import Policy
from tests.unit.policy_world import Nodes


class Program:
    def __init__(self, policy: Policy, pool: int) -> None:
        self.make = Nodes().make
        self.policy, self.pool, self.now = policy, pool, 0
        self.random = random.Random(0)
        self.results: deque[Any] = deque()
        self.selects = self.select_ns = self.rematerializations = 0
        self.selecting = False

    def operator(self) -> None:
        rng, results = self.random, self.results
        inputs: list[Any] = []
        if results:
            inputs.append(results[-1 - min(int(rng.expovariate(0.5)), len(results) - 1)])
            if rng.random() < 0.3:
                inputs.append(results[int(rng.random() * len(results))])
        for node in inputs:
            self.bring_back(node)
        cost = int(10_000 * 10 ** (2 * rng.random()))
        self.now += cost
        for node in inputs:
            node.last_access = self.now
        node = self.make(0, int(1024 * 10 ** (4 * rng.random())), cost, self.now, inputs)
        results.append(node)
        self.policy.insert(node)
        self.shrink()
        if len(results) > 2 * self.pool:
            old = results.popleft()
            self.policy.discard(old)
            if old.resident:  # a released storage stays in the graph while something depends on it
                old.resident = False
                self.policy.evicted(old)

    def bring_back(self, node: Any) -> None:
        """Rematerialize `node`, and before it every evicted storage that it needs."""
        pending = [node]
        while pending:
            node = pending[-1]
            missing = [parent for parent in node.inputs if not parent.resident]
            if node.resident or not missing:
                pending.pop()
                if not node.resident:
                    self.now += node.cost
                    node.resident, node.last_access = True, self.now
                    self.policy.rematerialized(node)
                    self.policy.insert(node)
                    self.rematerializations += 1
            else:
                pending += missing
        self.shrink()

    def shrink(self) -> None:
        while self.selecting and len(self.policy) > self.pool:
            started = time.thread_time_ns()
            node = self.policy.select(self.now, lambda node: True)
            self.select_ns += time.thread_time_ns() - started
            self.selects += 1
            assert node is not None
            node.resident = False
            self.policy.evicted(node)


def measure(scan: bool, heuristic: str, pool: int) -> tuple[float, float, float]:
    """Scores computed per eviction, µs of CPU time per search, and rematerializations per eviction."""
    program = Program(make_policy(heuristic, scan=scan), pool)
    while len(program.policy) < pool:
        program.operator()
    program.selecting = True
    # A scan always takes the same time; the heap is measured once a whole pool has been evicted.
    warm_up, selects = (10, 100_000 // pool) if scan else (pool, 3_000)
    while program.selects < warm_up:
        program.operator()
    evaluations, before = program.policy.score_evaluations, program.rematerializations
    program.selects = program.select_ns = 0
    while program.selects < selects:
        program.operator()
    evaluations = program.policy.score_evaluations - evaluations
    again = program.rematerializations - before
    return evaluations / program.selects, program.select_ns / program.selects / 1e3, again / program.selects


def main(heuristics: list[str]) -> None:
    print(f"{'heuristic':12} {'pool':>6} {'search':>6} {'scores/eviction':>16} {'µs/search':>10}")
    for heuristic in heuristics:
        for pool in (100, 1_000, 10_000):
            for name, scan in (("scan", True), ("heap", False)):
                evaluations, micros, _ = measure(scan, heuristic, pool)
                print(f"{heuristic:12} {pool:6} {name:>6} {evaluations:16.1f} {micros:10.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["h_dtr_eq", "h_dtr_local", "lru", "size"])
