"""e*: the exact evicted neighbourhood, cached (App. C.2, App. C.5)."""

from __future__ import annotations

from typing import Any

from .evicted import Evicted, depended_on, link, watch
from .foresight import Foresight
from .node import Node


class Member(Evicted):
    """An evicted storage; `watchers` are the pool nodes that have it among their evicted descendants."""

    __slots__ = ("watchers_below",)

    watchers_below: set[int]
    """Numbers of the pool nodes that have it among their evicted ancestors."""


class EvictedNeighbourhood:
    """e*(S) of every storage: its evicted ancestors, and (unless `ancestors_only`) evicted descendants.

    Both are cached by the node's number in the pool, and each is dropped by itself when an eviction or
    a rematerialization changes it. To be told, a node leaves its number at every storage on which its
    walk passed or ended.
    """

    def __init__(
        self, pool: dict[int, Any], due: set[int], ancestors_only: bool = False, foresees: bool = False
    ) -> None:
        """`due`: gets the numbers of the `pool` nodes whose projected cost may have fallen.

        ancestors_only: costs are those of e_R. foresees: `next_use` is asked for.
        """
        self._pool = pool
        self._due = due
        self._ancestors_only = ancestors_only
        self._looks_below = foresees or not ancestors_only
        self._dead: list[Member] = []
        self._above: dict[int, set[Member]] = {}
        self._below: dict[int, set[Member]] = {}

    def evicted(self, node: Node) -> None:
        member = node.component
        if member is not None and not member.dormant:
            return
        self.settle()
        pending = [node]
        while pending:
            node = pending.pop()
            member = node.component or self._enter(node)
            if not member.dormant or not self._looks_below:
                continue
            link(node, member)
            for parent in node.inputs:
                above = parent.component
                if above is None:
                    if parent.bound is not None:
                        self._below.pop(parent.bound, None)
                    continue
                self._forget(self._below, above.watchers)
                if above.dormant:
                    pending.append(parent)

    def released(self, node: Node) -> None:
        if depended_on(node):
            self.evicted(node)
        elif node.component is None:
            self.settle()
            self._enter(node)

    def _enter(self, node: Node) -> Member:
        if node.neighbourhood:
            self._forget(self._above, node.neighbourhood)
            node.neighbourhood.clear()
        node.component = member = Member(node, self._dead.append)
        member.watchers_below = set()
        return member

    def left(self, node: Node) -> None:
        """`node` was rematerialized, or died, or lost its recipe."""
        self.settle()
        member = node.component
        if member is not None:
            node.component = None
            self._leave(member)

    def settle(self) -> None:
        """Take those out that died unannounced: deaths come at any moment, so they only queue up.

        And drop what is cached for nodes that have left the pool.
        """
        while self._dead:
            self._leave(self._dead.pop())
        for cache in (self._above, self._below):
            if len(cache) > 64 + 2 * len(self._pool):
                for number in [number for number in cache if number not in self._pool]:
                    del cache[number]

    def projected_cost(self, node: Node, number: int) -> int:
        """c_0(S) + Σ cost over e*(S), or over e_R(S) with `ancestors_only`."""
        above = self._above.get(number)
        if above is None:
            above = self._above[number] = self._ancestors(node, number)
        if self._ancestors_only:
            return node.cost + sum([member.cost for member in above])
        below = self._evicted_below(node, number)
        # Storages that were mutated with one another's help can stand on both sides.
        both = above if not below else below if not above else above | below
        return node.cost + sum([member.cost for member in both])

    def next_use(self, node: Node, number: int, foresight: Foresight) -> int | None:
        """When S is next wanted: by the program, or because an evicted descendant is."""
        first = foresight.next_use(node)
        for member in self._evicted_below(node, number):
            storage = member()
            following = None if storage is None else foresight.next_use(storage)
            if following is not None and (first is None or following < first):
                first = following
        return first

    def _evicted_below(self, node: Node, number: int) -> set[Member]:
        below = self._below.get(number)
        if below is None:
            below = self._below[number] = self._descendants(node, number)
        return below

    def watched_cost(self, node: Node, number: int) -> tuple[int, float]:
        """The projected cost, twice: it holds until `number` is put into `due`."""
        cost = self.projected_cost(node, number)
        return cost, cost

    def changed(self, number: int) -> None:
        """The node of that number may have other inputs."""
        self._above.pop(number, None)

    def _ancestors(self, node: Node, number: int) -> set[Member]:
        found: set[Member] = set()
        pending = list(node.inputs)
        while pending:
            storage = pending.pop()
            member = storage.component
            if member is not None:
                if member not in found:
                    found.add(member)
                    watch(member.watchers_below, number, self._pool)
                    pending.extend(storage.inputs)
            elif not storage.constant:
                if storage.neighbourhood is None:
                    storage.neighbourhood = set()
                watch(storage.neighbourhood, number, self._pool)
        return found

    def _descendants(self, node: Node, number: int) -> set[Member]:
        found: set[Member] = set()
        pending = list(node.dependents.values()) if node.dependents else []
        while pending:
            member = pending.pop()
            storage = member()
            if storage is not None and not member.gone and member not in found:
                found.add(member)
                watch(member.watchers, number, self._pool)
                if storage.dependents:
                    pending.extend(storage.dependents.values())
        return found

    def _forget(self, cache: dict[int, set[Member]], watchers: set[int]) -> None:
        for number in watchers:
            cache.pop(number, None)

    def _leave(self, member: Member) -> None:
        if member.gone:
            return
        member.gone = True
        self._due |= member.watchers
        self._due |= member.watchers_below
        self._forget(self._below, member.watchers)
        self._forget(self._above, member.watchers_below)
