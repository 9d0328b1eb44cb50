"""Counts of storage accesses, as a measure of a policy's work (App. D.3).

There is one for each score computed, and one for each storage visited for the neighbourhoods: while an exact
e* is rebuilt or updated, and on each path through the union-find forest. The sum of a cached e* is read with
the score. The heap search has one more for each storage that it considers without computing its score.

Counting costs time, so it is in separate classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dtrrun.core.heuristics import Heuristic
from dtrrun.core.neighbourhoods import Component, Evicted, EvictedComponents, EvictedNeighbourhood, Member
from dtrrun.core.node import N, Node
from dtrrun.core.pool import Policy
from dtrrun.core.search import HeapSearch, ScanSearch


class _CountingNeighbourhood(EvictedNeighbourhood):
    visited = 0

    def _ancestors(self, node: Node, number: int) -> set[Member]:
        found = super()._ancestors(node, number)
        self.visited += len(node.inputs) + sum(len(one.inputs) for one in _alive(found))
        return found

    def _descendants(self, node: Node, number: int) -> set[Member]:
        found = super()._descendants(node, number)
        self.visited += sum(len(one.dependents or ()) for one in (node, *_alive(found)))
        return found

    def _forget(self, cache: dict[int, set[Member]], watchers: set[int]) -> None:
        super()._forget(cache, watchers)
        self.visited += len(watchers)


class _CountingComponents(EvictedComponents):
    visited = 0

    def evicted(self, node: Node) -> None:
        super().evicted(node)
        parents = [parent.component for parent in node.inputs if parent.component is not None]
        children = [one for one in (node.dependents or {}).values() if not one.gone]
        self.visited += 1 + sum(map(depth, parents)) + sum(map(depth, children))

    def _evicted_neighbours(self, node: Node) -> list[Component]:
        found = super()._evicted_neighbours(node)
        self.visited += sum(map(depth, found))
        return found

    def _leave(self, element: Component) -> None:
        self.visited += depth(element)
        super()._leave(element)


class _CountingSearch(HeapSearch[N]):
    looked_at = 0

    def _look_at(self, numbers: Iterable[tuple[int, float | None]], *arguments: Any) -> None:
        super()._look_at(self._counted(numbers), *arguments)

    def _counted(self, numbers: Iterable[tuple[int, float | None]]) -> Iterable[tuple[int, float | None]]:
        for one in numbers:
            self.looked_at += one[0] in self._pool
            yield one


def depth(element: Component) -> int:
    """Return the number of storages from `element` to its component's root, both included."""
    count = 1
    while element.parent is not None:
        element = element.parent
        count += 1
    return count


def _alive(members: Iterable[Evicted]) -> list[Any]:
    return [storage for one in members if (storage := one()) is not None]


def counting_policy(heuristic: Heuristic, *, latest: bool, scan: bool, seed: int = 0) -> Policy[Any]:
    """Return a policy that counts; see `accesses`. Its choices are those of one that does not."""
    policy: Policy[Any]
    if scan or not heuristic.ordered:
        policy = ScanSearch(heuristic, seed=seed, latest=latest)
    else:
        policy = _CountingSearch(heuristic, latest=latest)
    pool, due = policy._pool, policy._due
    if heuristic.neighbourhood == "eqclass":
        policy._neighbourhood = _CountingComponents(pool, due)
    elif heuristic.neighbourhood != "none":
        policy._neighbourhood = _CountingNeighbourhood(
            pool, due, heuristic.neighbourhood == "ancestors", heuristic.foresight > 0
        )
    return policy


def accesses(policy: Policy[Any]) -> int:
    """Return the number of storage accesses of a `counting_policy` so far."""
    scored = policy.looked_at if isinstance(policy, _CountingSearch) else policy.score_evaluations
    visited: int = getattr(policy._neighbourhood, "visited", 0)
    return scored + visited
