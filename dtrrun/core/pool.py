"""The pool of evictable storages (App. C.4), and the events that change it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any, Generic, Protocol

from dtrrun.core.foresight import Foresight
from dtrrun.core.heuristics import Heuristic
from dtrrun.core.neighbourhoods import EvictedComponents, EvictedNeighbourhood
from dtrrun.core.node import N, Node


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
    """For heuristics that consider only the storage itself."""

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

    Its owner reports what happens to the nodes, each event once and in order. Accesses are not reported:
    `last_access` is read when a score is computed. Not thread-safe and not re-entrant, but an evicted node
    may die at any moment without notice.
    """

    score_evaluations: int
    scoring_ns: int
    """Time spent computing scores, including reading neighbourhoods."""
    search_ns: int
    """Time spent in `select`, excluding `scoring_ns`."""

    def __init__(self, heuristic: Heuristic, ignore_small: float = 0.0, latest: bool = False) -> None:
        """ignore_small: nodes below this fraction of the pool's mean size are chosen last (App. E.2).

        latest: among equal scores, choose the node inserted last, not first.
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
        """Numbers of nodes whose score must be recomputed before the next choice."""
        self._neighbourhood = _neighbourhood(heuristic, self._pool, self._due)
        self._adjusts = heuristic.foresight > 0 or heuristic.released != 1
        self.foresight: Foresight | None = None
        """Set by the owner, for heuristics that use foresight."""

    def __len__(self) -> int:
        """Return the number of nodes in the pool."""
        return len(self._pool)

    def __iter__(self) -> Iterator[N]:
        """Return the nodes in the pool, in the order in which they were inserted."""
        return iter(list(self._pool.values()))

    @property
    def nbytes(self) -> int:
        """The bytes of the nodes in the pool."""
        return self._pool_nbytes

    def insert(self, node: N) -> None:
        """`node` became resident and evictable. No effect if it is in the pool already or has no bytes."""
        if node.bound is None and node.nbytes > 0:
            self._last_number = number = self._last_number + self._step
            node.bound = number
            self._pool[number] = node
            self._pool_nbytes += node.nbytes
            self._due.add(number)

    def discard(self, node: N) -> None:
        """`node` can no longer be evicted: it died or was pinned. No effect if it is not in the pool."""
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
        """The program released `node` and its memory is freed, while something evictable depends on it.

        The paper counts this as an eviction.
        """
        self.discard(node)
        if not node.constant:
            self._neighbourhood.released(node)

    def rematerialized(self, node: N) -> None:
        """`node` is resident again; `insert` it when it is evictable too."""
        self._neighbourhood.left(node)

    def forget(self, node: N) -> None:
        """`node`, which is evicted, will never be rematerialized. A node's death need not be reported."""
        self._neighbourhood.left(node)

    def _factor(self, node: N, number: int, *, whole: bool = True) -> float:
        """Return the factor on the score.

        It can only rise until the time given to `_expect`, or until the neighbourhood reports a change.

        whole: False for a lower bound that considers the node alone.
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
        """The score of this node may fall once the recorded step has reached this time."""

    def _look_ahead(self) -> None:
        if self.foresight is not None and self.foresight.look():
            self._due.update(self._pool)

    def cost_changed(self, node: N) -> None:
        """`node`, resident, has a new cost or other inputs."""
        if node.bound is not None:
            self._due.add(node.bound)
            self._neighbourhood.changed(node.bound)

    def projected_cost(self, node: N) -> int:
        """Return c(node) in ns, including what must be computed before it.

        If it is not in the pool, its own cost.
        """
        number = node.bound
        self._neighbourhood.settle()
        return node.cost if number is None else self._neighbourhood.projected_cost(node, number)

    def select(self, now: int, evictable: Callable[[N], bool]) -> N | None:
        """Return the resident node with the least score at clock value `now`, or None if there is none.

        `evictable` is called for the node about to be chosen; if it returns False the node is skipped this
        time. It may discard nodes. Among equal scores, the node inserted first (or last) is chosen. The
        chosen node stays in the pool until its eviction is reported.
        """
        started = perf_counter_ns()
        scoring = self.scoring_ns
        try:
            self._neighbourhood.settle()
            self._look_ahead()
            chosen = self._choose(now, lambda node: node.resident and evictable(node))
        except BaseException:  # usually Ctrl-C: the nodes under consideration must not be lost
            self._due.update(self._pool)
            raise
        self.search_ns += perf_counter_ns() - started - (self.scoring_ns - scoring)
        return chosen

    @abstractmethod
    def _choose(self, now: int, evictable: Callable[[N], bool]) -> N | None: ...

    def _least_nbytes(self) -> float:
        """Return the size below which nodes are chosen last."""
        if not self._ignore_small or not self._pool:
            return 0
        return self._ignore_small * self._pool_nbytes / len(self._pool)
