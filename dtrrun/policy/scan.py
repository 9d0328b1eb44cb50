"""The plain search: the score of every candidate, each time; any heuristic will do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from heapq import heapify, heappop
from math import ceil, sqrt
from time import perf_counter_ns

from .heuristics import Heuristic
from .node import N
from .pool import Policy


class ScanSearch(Policy[N]):
    """Scores the whole pool, or a random √n of its n nodes (App. E.2)."""

    def __init__(
        self,
        heuristic: Heuristic,
        ignore_small: float = 0.0,
        sample: bool = False,
        seed: int = 0,
        latest: bool = False,
    ) -> None:
        super().__init__(heuristic, ignore_small, latest)
        self._sample = sample
        self._random = random.Random(seed)

    def _choose(self, now: int, evictable: Callable[[N], bool]) -> N | None:
        self._due.clear()
        for candidates in self._in_turn():
            chosen = self._least(candidates, now, evictable)
            if chosen is not None:
                return chosen
        return None

    def _in_turn(self) -> Iterator[list[tuple[int, N]]]:
        """The candidates; then what to fall back to when none of them is evictable."""
        least_nbytes = self._least_nbytes()
        large = [item for item in self._pool.items() if item[1].nbytes >= least_nbytes]
        if self._sample:
            sample = set(self._random.sample(range(len(large)), ceil(sqrt(len(large)))))
            yield [large[i] for i in sample]
            yield [item for i, item in enumerate(large) if i not in sample]
        else:
            yield large
        yield [item for item in self._pool.items() if item[1].nbytes < least_nbytes]

    def _least(self, candidates: list[tuple[int, N]], now: int, evictable: Callable[[N], bool]) -> N | None:
        started = perf_counter_ns()
        score, adjusts = self.heuristic.score, self._adjusts
        projected_cost = self._neighbourhood.projected_cost
        scored = [
            (
                score(
                    node.nbytes,
                    max(now - node.last_access, 1),
                    node.cost,
                    projected_cost(node, number),
                )
                * (self._factor(node, number) if adjusts else 1),
                number,
                node,
            )
            for number, node in candidates
        ]
        self.score_evaluations += len(scored)
        self.scoring_ns += perf_counter_ns() - started
        heapify(scored)
        while scored:
            _, number, node = heappop(scored)
            if number in self._pool and evictable(node):
                return node
        return None
