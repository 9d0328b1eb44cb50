"""The search for the storage with the least score, and how a policy is made.

    policy = make_policy("h_dtr_eq")
    policy.insert(node)                        # a storage became resident and evictable
    victim = policy.select(now, evictable)     # the one to evict, or None
    policy.evicted(victim)                     # it was
    policy.rematerialized(victim)              # it came back; `insert` it when it is evictable again

`ScanSearch` computes every score each time, and works with any heuristic. `HeapSearch` keeps lower bounds,
each valid up to a time of its own. Between the events that touch a storage's neighbourhood its score only
falls, as 1/staleness does. So once a score has been computed the node sleeps: a lower bound is stored that
holds until its waking time, which is halfway to the time when its score could become the least. A search
considers the nodes that are due (new, or reported by the neighbourhood because their cost may have fallen),
those that wake, and those whose bound is not above the least score found. Of these, it computes only the
scores that may be the least. The choice is exactly that of the scan (`ScanSearch` is the tests' oracle).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import ceil, sqrt
from time import perf_counter_ns
from typing import Any

from dtrrun.core.heuristics import Heuristic, make_heuristic
from dtrrun.core.node import N
from dtrrun.core.pool import Policy


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
        """Yield the candidates, then what to fall back to if none of them is evictable."""
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


ROUNDING = 1 - 1e-12
"""Keeps a bound computed in a different order of operations below the score itself."""

FAR = 4
"""If a node's own cost alone gives a score this many times the least, its neighbourhood is not read."""

_Entry = tuple[float, int, int, float, bool]
"""Lower bound, number, last clock value at which it holds, its value at staleness 1, and whether that
includes the neighbourhood's cost."""

_Candidate = tuple[float, int, N, float]
"""Score, number, node, and a lower bound of the score at staleness 1, valid while the node is not due."""


class HeapSearch(Policy[N]):
    """Finds the exact least score of the whole pool, for heuristics that are `ordered`."""

    def __init__(self, heuristic: Heuristic, ignore_small: float = 0.0, latest: bool = False) -> None:
        super().__init__(heuristic, ignore_small, latest)
        self._exponent = heuristic.exponent
        self._far = FAR if heuristic.neighbourhood != "none" else 1
        self._bounds: list[_Entry] = []
        """A heap."""
        self._asleep: dict[int, _Entry] = {}
        """The valid entry in `_bounds` of each number; all others are stale."""
        self._wakings: list[tuple[int, int]] = []
        """Heap of (clock value, number), no later than the end of the validity of the number's bound."""
        self._waking: dict[int, int] = {}
        """The valid clock value in `_wakings` of each number."""
        self._small: list[tuple[int, int]] = []
        """Heap of (-bytes, number): nodes that were too small to be candidates."""
        self._expected: list[tuple[int, int]] = []
        """Heap of (time, number): when a node, or what depends on it, is used next."""
        self._expecting: dict[int, int] = {}
        """The valid time in `_expected` of each number."""
        self._origin: int | None = None
        """Clock value at which the program began."""
        self._longest = 0
        """The longest sleep: the time in which as many nodes are inserted as the pool has."""

    def _expect(self, number: int, time: int) -> None:
        if self._expecting.get(number) != time:
            self._expecting[number] = time
            heappush(self._expected, (time, number))

    def _look_ahead(self) -> None:
        foresight, expected = self.foresight, self._expected
        if foresight is None:
            return
        if foresight.look():  # the expected times belong to another step or place
            self._due.update(self._pool)
            expected.clear()
            self._expecting.clear()
        elif foresight.position is not None:
            while expected and expected[0][0] <= foresight.position:
                time, number = heappop(expected)
                if self._expecting.get(number) == time:
                    del self._expecting[number]
                    if number in self._pool:
                        self._due.add(number)

    def _choose(self, now: int, evictable: Callable[[N], bool]) -> N | None:
        self._set_longest(now)
        least_nbytes = self._least_nbytes()
        candidates: list[_Candidate[N]] = []
        woken = self._wake(now, least_nbytes)
        self._look_at(self._below(candidates), candidates, now, least_nbytes)
        self._look_at(woken, candidates, now, least_nbytes)
        self._look_at([(number, None) for number in self._due], candidates, now, least_nbytes)
        self._due.clear()
        refused: list[_Candidate[N]] = []
        chosen: _Candidate[N] | None = None
        while chosen is None:
            self._look_at(self._below(candidates), candidates, now, least_nbytes)
            if not candidates:
                break
            candidate = heappop(candidates)
            if candidate[1] in self._pool and evictable(candidate[2]):
                chosen = candidate
            else:
                refused.append(candidate)
        if chosen is not None:
            self._due.add(chosen[1])  # in case it is not evicted after all
        for _, number, node, share in candidates + refused:
            self._put_to_sleep(number, node, share, now, chosen[0] if chosen else 0)
        self._sweep()
        return chosen[2] if chosen else self._choose_small(now, evictable)

    def _set_longest(self, now: int) -> None:
        if self._origin is None and self._pool:
            self._origin = min(node.last_access for node in self._pool.values())
        if self._origin is not None:
            self._longest = (now - self._origin) * len(self._pool) // abs(self._last_number)

    def _wake(self, now: int, least_nbytes: float) -> list[tuple[int, float | None]]:
        """Remove the bounds that have expired. Returns their numbers and their values at staleness 1."""
        wakings, waking, asleep = self._wakings, self._waking, self._asleep
        while self._small and -self._small[0][0] >= least_nbytes:
            self._due.add(heappop(self._small)[1])
        for number in self._due:
            asleep.pop(number, None)
        woken: list[tuple[int, float | None]] = []
        while wakings and wakings[0][0] < now:
            time, number = heappop(wakings)
            if waking.get(number) != time:
                continue
            entry = asleep.get(number)
            if entry is None:
                del waking[number]
            elif entry[2] < now:
                del waking[number], asleep[number]
                woken.append((number, entry[3] if entry[4] else None))
            else:  # its bound has been renewed since
                waking[number] = entry[2]
                heappush(wakings, (entry[2], number))
        return woken

    def _below(self, candidates: list[_Candidate[N]]) -> Iterator[tuple[int, float | None]]:
        """Remove every bound that is below the first candidate."""
        bounds, asleep = self._bounds, self._asleep
        while bounds:
            bound, number, _, share, known = entry = bounds[0]
            if candidates and (bound > candidates[0][0] or entry[:2] > candidates[0][:2]):
                break
            heappop(bounds)
            if asleep.get(number) is entry:
                del asleep[number]
                yield number, share if known else None

    def _look_at(
        self,
        numbers: Iterable[tuple[int, float | None]],
        candidates: list[_Candidate[N]],
        now: int,
        least_nbytes: float,
    ) -> None:
        """Make candidates of those nodes that may score less than the first candidate.

        Each number comes with a lower bound of its score at staleness 1, neighbourhood included, or None.
        """
        pool, score, ages = self._pool, self.heuristic.score, self.heuristic.ages
        exponent, adjusts = self._exponent, self._adjusts
        watched_cost = self._neighbourhood.watched_cost
        above: list[tuple[int, N, float, bool]] = []
        for number, share in numbers:
            node = pool.get(number)
            if node is None:
                continue
            size, own = node.nbytes, node.cost
            if size < least_nbytes:
                heappush(self._small, (-size, number))
                continue
            staleness = now - node.last_access if ages else 1
            if staleness < 1:
                staleness = 1
            if candidates:
                best_share = candidates[0][0] * (staleness if exponent == 1 else staleness**exponent)
                if share is not None:
                    if share * ROUNDING > best_share:
                        above.append((number, node, share, True))
                        continue
                else:
                    share = score(size, 1, own, own)
                    if adjusts:
                        share *= self._factor(node, number, whole=False)
                    if share * ROUNDING > best_share * self._far:
                        above.append((number, node, share, self._far == 1))
                        continue
            started = perf_counter_ns()
            factor = self._factor(node, number) if adjusts else 1
            cost, lower = watched_cost(node, number)
            found = score(size, staleness, own, cost) * factor
            candidate = found, number, node, score(size, 1, own, lower) * factor
            self.scoring_ns += perf_counter_ns() - started
            self.score_evaluations += 1
            heappush(candidates, candidate)
        best = candidates[0][0] if candidates else 0
        for number, node, share, known in above:  # after the loop, so that each is considered once
            self._put_to_sleep(number, node, share, now, best, known)

    def _put_to_sleep(
        self, number: int, node: N, share: float, now: int, best: float, known: bool = True
    ) -> None:
        """Store a lower bound for `node`. best: the least score now, 0 if there is none."""
        if not self.heuristic.ages:
            self._asleep[number] = entry = share, number, 0, share, known
            heappush(self._bounds, entry)
            return
        staleness = now - node.last_access
        if staleness < 1:
            staleness = 1
        exponent = self._exponent
        if share > best * (staleness if exponent == 1 else staleness**exponent) > 0:
            farther = min(share / best, 2.0 ** (1000 * exponent))  # so that its root is a float
            sleep = ((farther if exponent == 1 else farther ** (1 / exponent)) - staleness) / 2
            stalest = staleness + int(sleep if sleep < self._longest else self._longest)
        else:
            stalest = staleness + staleness // 64 + 1
        until = node.last_access + stalest
        bound = share / (stalest if exponent == 1 else stalest**exponent) * ROUNDING
        self._asleep[number] = entry = bound, number, until, share, known
        heappush(self._bounds, entry)
        if self._waking.get(number, until + 1) > until:
            self._waking[number] = until
            heappush(self._wakings, (until, number))

    def _choose_small(self, now: int, evictable: Callable[[N], bool]) -> N | None:
        """Choose among the nodes set aside as too small, when nothing else is left."""
        candidates: list[_Candidate[N]] = []
        for number in {number for _, number in self._small}:
            alone: list[_Candidate[N]] = []  # no competitors, so that its score is computed
            self._look_at([(number, None)], alone, now, 0)
            candidates += alone
        heapify(candidates)
        while candidates:
            _, number, node, _ = heappop(candidates)
            if number in self._pool and evictable(node):
                return node
        return None

    def _sweep(self) -> None:
        """Drop stale entries when they outnumber the valid ones."""
        pool, limit = self._pool, 64 + 2 * len(self._pool)
        if max(len(self._bounds), len(self._wakings)) > limit:
            self._asleep = {n: entry for n, entry in self._asleep.items() if n in pool}
            self._bounds = list(self._asleep.values())
            heapify(self._bounds)
            self._waking = {n: time for n, time in self._waking.items() if n in self._asleep}
            self._wakings = [(time, n) for n, time in self._waking.items()]
            heapify(self._wakings)
        if len(self._expected) > limit:
            self._expecting = {n: time for n, time in self._expecting.items() if n in pool}
            self._expected = sorted((time, n) for n, time in self._expecting.items())
        if len(self._small) > limit:
            self._small = [(size, number) for size, number in self._small if number in pool]
            heapify(self._small)


def make_policy(
    heuristic: str,
    *,
    seed: int = 0,
    sample: bool = False,
    ignore_small: float = 0.0,
    latest: bool = False,
    scan: bool = False,
) -> Policy[Any]:
    """Make a policy that evicts by `heuristic` (one of HEURISTIC_NAMES, h'(s=…,m=…,c=…) or module:function).

    seed: for the `random` heuristic and for sampling. sample: search only a random √n of the n nodes.
    ignore_small: nodes below this fraction of the mean size are chosen only when nothing else is left.
    latest: among equal scores, choose the node inserted last, not first. scan: compute every score at each
    choice; the choices are the same. Raises ValueError for a heuristic that is unknown or cannot be loaded.
    """
    chosen = make_heuristic(heuristic, seed)
    if scan or sample or not chosen.ordered:
        return ScanSearch(chosen, ignore_small, sample, seed, latest)
    return HeapSearch(chosen, ignore_small, latest)
