"""The pool of evictable storages (App. C.4), and the events that change it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Generic, Protocol

from .eqclass import EvictedComponents
from .foresight import Foresight
from .heuristics import Heuristic
from .neighbourhood import EvictedNeighbourhood
from .node import N, Node


class _Neighbourhood(Protocol):
    def evicted(self, node: Node) -> None: ...
    def released(self, node: Node) -> None: ...
    def left(self, node: Node) -> None: ...
    def settle(self) -> None: ...
    def changed(self, number: int) -> None: ...
    def projected_cost(self, node: Node, number: int) -> int: ...
    def watched_cost(self, node: Node, number: int) -> tuple[int, float]: ...
    def next_use(self, node: Node, number: int, foresight: Foresight) -> int | None: ...


class _NoNeighbourhood:
    """For heuristics that look at the storage alone."""

    def evicted(self, node: Node) -> None:
        pass

    def released(self, node: Node) -> None:
        pass

    def left(self, node: Node) -> None:
        pass

    def settle(self) -> None:
        pass

    def changed(self, number: int) -> None:
        pass

    def projected_cost(self, node: Node, number: int) -> int:
        return node.cost

    def watched_cost(self, node: Node, number: int) -> tuple[int, float]:
        return node.cost, node.cost

    def next_use(self, node: Node, number: int, foresight: Foresight) -> int | None:
        return foresight.next_use(node)


def _neighbourhood(heuristic: Heuristic, pool: dict[int, Any], due: set[int]) -> _Neighbourhood:
    if heuristic.neighbourhood == "none":
        return _NoNeighbourhood()
    if heuristic.neighbourhood == "eqclass":
        return EvictedComponents(pool, due)
    return EvictedNeighbourhood(pool, due, heuristic.neighbourhood == "ancestors", heuristic.foresight > 0)


class Policy(ABC, Generic[N]):
    """Chooses what to evict among the nodes inserted into it.

    Its owner reports what happens to the nodes, each event once and in the order in which it happens,
    and tells of no access: the clock value in `last_access` is read when a score is computed. Neither
    thread-safe nor re-entrant, except that an evicted node may die at any moment, unannounced.
    """

    score_evaluations: int
    scoring_ns: int
    """Time in computing scores, the reading of neighbourhoods included."""
    search_ns: int
    """Time in `select` besides."""

    def __init__(self, heuristic: Heuristic, ignore_small: float = 0.0, latest: bool = False) -> None:
        """`ignore_small`: nodes under this share of the pool's mean size are chosen last (App. E.2).

        latest: of equal scores, choose the node that was inserted last, not first.
        """
        self.heuristic = heuristic
        self._step = -1 if latest else 1
        self.score_evaluations = 0
        self.scoring_ns = 0
        self.search_ns = 0
        self._ignore_small = ignore_small
        self._pool: dict[int, N] = {}
        self._pool_nbytes = 0
        self._last_number = 0
        self._due: set[int] = set()
        """Numbers of nodes whose score has to be computed anew before the next choice."""
        self._neighbourhood = _neighbourhood(heuristic, self._pool, self._due)
        self._adjusts = heuristic.foresight > 0 or heuristic.released != 1
        self.foresight: Foresight | None = None
        """Set by the owner, for heuristics that have one."""

    def __len__(self) -> int:
        """How many nodes are in the pool."""
        return len(self._pool)

    def insert(self, node: N) -> None:
        """`node` became resident and evictable; nothing if it is in the pool already, or holds no bytes."""
        if node.bound is None and node.nbytes > 0:
            self._last_number = number = self._last_number + self._step
            node.bound = number
            self._pool[number] = node
            self._pool_nbytes += node.nbytes
            self._due.add(number)

    def discard(self, node: N) -> None:
        """`node` is evictable no longer: died, or was pinned. Nothing if it is not in the pool."""
        number = node.bound
        if number is not None:
            node.bound = None
            del self._pool[number]
            self._pool_nbytes -= node.nbytes
            self._due.discard(number)

    def evicted(self, node: N) -> None:
        """`node` was evicted."""
        self.discard(node)
        if not node.constant:
            self._neighbourhood.evicted(node)

    def released(self, node: N) -> None:
        """The program let go of `node`, whose memory is gone, while something evictable depends on it.

        The paper counts this as an eviction.
        """
        self.discard(node)
        if not node.constant:
            self._neighbourhood.released(node)

    def rematerialized(self, node: N) -> None:
        """`node` is resident again; `insert` it when it is evictable too."""
        self._neighbourhood.left(node)

    def forget(self, node: N) -> None:
        """`node`, evicted, will never be rematerialized. A record's death need not be told."""
        self._neighbourhood.left(node)

    def _factor(self, node: N, number: int, *, whole: bool = True) -> float:
        """On the score; until `_expect`ed, or until the neighbourhood tells otherwise, it can only rise.

        whole: False for a lower bound, for which nothing but the node is looked at.
        """
        heuristic, foresight = self.heuristic, self.foresight
        factor = heuristic.released if node.released else 1.0
        if foresight is not None and foresight.position is not None:
            if whole:
                following = self._neighbourhood.next_use(node, number, foresight)
            else:
                following = foresight.next_use(node)
            distance = foresight.horizon
            if following is not None:
                distance = following - foresight.position
                self._expect(number, following)
            factor /= max(distance, 1) ** heuristic.foresight
        return factor

    def _expect(self, number: int, time: int) -> None:
        """After that time of the foreseen step the score of the node of that number may fall."""

    def _look_ahead(self) -> None:
        if self.foresight is not None and self.foresight.look():
            self._due.update(self._pool)

    def cost_changed(self, node: N) -> None:
        """`node`, resident, has a new cost or other inputs."""
        if node.bound is not None:
            self._due.add(node.bound)
            self._neighbourhood.changed(node.bound)

    def projected_cost(self, node: N) -> int:
        """c(node), in ns: with what must be computed before it; its own cost if it is not in the pool."""
        number = node.bound
        return node.cost if number is None else self._neighbourhood.projected_cost(node, number)

    def select(self, now: int, evictable: Callable[[N], bool]) -> N | None:
        """The resident node with the least score at clock value `now`, or None if there is none.

        `evictable` is asked about the node that is about to be chosen; one that it refuses is passed
        over, this time; to find out, it may discard nodes. Of equal scores, the node that was inserted
        first (or last) is chosen. The chosen node stays in the pool until its eviction is reported.
        """
        started = perf_counter_ns()
        scoring = self.scoring_ns
        try:
            self._neighbourhood.settle()
            self._look_ahead()
            chosen = self._choose(now, lambda node: node.resident and evictable(node))
        except BaseException:  # Ctrl-C, most likely: what was being looked at must not be lost
            self._due.update(self._pool)
            raise
        self.search_ns += perf_counter_ns() - started - (self.scoring_ns - scoring)
        return chosen

    @abstractmethod
    def _choose(self, now: int, evictable: Callable[[N], bool]) -> N | None: ...

    def _least_nbytes(self) -> float:
        """Nodes under this size are chosen last."""
        if not self._ignore_small or not self._pool:
            return 0
        return self._ignore_small * self._pool_nbytes / len(self._pool)
