"""Evicted neighbourhoods: what would have to be recomputed along with a storage (Sec. 4.1, App. C.2, C.5).

`EvictedNeighbourhood` is e*, exact and cached. `EvictedComponents` is its relaxation ẽ*: components in a
union-find structure, with running sums.

Evicted storages are referenced weakly: a node dies as soon as the program and its dependents have released
it.

A storage that the program has released is *dormant* while nothing that depends on it is evicted. It will not
be needed then, so it is in no neighbourhood of what it was computed from. What depends on it counts its cost,
since it would have to be rematerialized first. (The paper counts a released storage as evicted at once. An
activation updated in place then counts against the eviction of what it was computed from.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

from dtrrun.core.foresight import Foresight
from dtrrun.core.node import Node


class Evicted(weakref.ref[Any]):
    """One evicted storage, from its eviction to its rematerialization or death.

    Its inputs list it in their `dependents`, weakly, since a parent must not keep its child alive.
    """

    __slots__ = ("cost", "dormant", "gone", "watchers")

    cost: int
    """c_0 at the time of eviction."""
    dormant: bool
    """Not yet among the evicted dependents of its inputs."""
    gone: bool
    """Rematerialized or dead; remaining references to it must be ignored."""
    watchers: set[int]
    """Numbers of the pool nodes whose projected cost assumes that this storage is evicted."""

    # By identity: a plain weakref hashes and compares as its referent.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, node: Node, on_death: Callable[[Any], None]) -> None:
        super().__init__(node, on_death)  # type: ignore[call-arg]
        self.cost = node.cost
        self.dormant = True
        self.gone = False
        self.watchers = set()


def depended_on(node: Node) -> bool:
    """Return whether something evicted is computed from `node`."""
    return bool(node.dependents) and any(not member.gone for member in node.dependents.values())


def link(node: Node, member: Evicted) -> None:
    """Enter `node` among the evicted dependents of its inputs (deps_e^T); it is no longer dormant."""
    member.dormant = False
    key = id(node)
    for parent in node.inputs:
        if parent.constant:
            continue
        dependents = parent.dependents
        if dependents is None:
            parent.dependents = {key: member}
            continue
        dependents[key] = member
        count = len(dependents)
        if count >= 64 and not count & (count - 1):  # those that are gone leave an entry
            for stale in [k for k, other in dependents.items() if other.gone]:
                del dependents[stale]


def watch(watchers: set[int], number: int, pool: Container[int]) -> None:
    """Add `number`. When there are many, drop those that have left the pool."""
    watchers.add(number)
    if len(watchers) >= 64 and not len(watchers) & (len(watchers) - 1):
        watchers -= {stale for stale in watchers if stale not in pool}


class Member(Evicted):
    """An evicted storage; `watchers` are the pool nodes that have it among their evicted descendants."""

    __slots__ = ("watchers_below",)

    watchers_below: set[int]
    """Numbers of the pool nodes that have it among their evicted ancestors."""


class EvictedNeighbourhood:
    """e*(S) of every storage: its evicted ancestors and (unless `ancestors_only`) evicted descendants.

    Both are cached by the node's number in the pool, and dropped separately when an eviction or a
    rematerialization changes them. For this, a node leaves its number at every storage that its walk visited.
    """

    def __init__(
        self, pool: dict[int, Any], due: set[int], ancestors_only: bool = False, foresees: bool = False
    ) -> None:
        """due: receives the numbers of the `pool` nodes whose projected cost may have fallen.

        ancestors_only: costs are those of e_R. foresees: `next_use` will be called.
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
        """Remove those that died. Deaths occur at any moment, so they are only queued.

        Also drop cache entries of nodes that have left the pool.
        """
        while self._dead:
            self._leave(self._dead.pop())
        for cache in (self._above, self._below):
            if len(cache) > 64 + 2 * len(self._pool):
                for number in [number for number in cache if number not in self._pool]:
                    del cache[number]

    def projected_cost(self, node: Node, number: int) -> int:
        """Return c_0(S) + Σ cost over e*(S), or over e_R(S) with `ancestors_only`."""
        above = self._above.get(number)
        if above is None:
            above = self._above[number] = self._ancestors(node, number)
        if self._ancestors_only:
            return node.cost + sum([member.cost for member in above])
        below = self._evicted_below(node, number)
        # Storages that were mutated with one another's help can be on both sides.
        both = above if not below else below if not above else above | below
        return node.cost + sum([member.cost for member in both])

    def next_use(self, node: Node, number: int, foresight: Foresight) -> int | None:
        """Return when S is next needed, by the program or for an evicted descendant."""
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
        """Return the projected cost, twice: it holds until `number` is put into `due`."""
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


SLACK = 1 / 64
"""How far a component's cost may fall before the bounds that rely on it are renewed.

A larger value loosens the bounds, so more scores are computed per search; a smaller one renews more bounds
after rematerializations.
"""

DORMANT = 64
"""How many dormant storages a projected cost may count. Beyond that they are joined like evicted ones."""


class Component(Evicted):
    """An evicted storage as an element of the union-find forest. A root represents its component.

    A dormant one is a component by itself.
    """

    __slots__ = ("above", "floor", "members", "parent", "total", "watchers_of_all")

    above: int
    """Dormant: an upper bound on how many dormant storages it is computed from, including itself."""

    parent: Component | None
    members: int
    total: int
    """Root: the sum of its members' costs."""
    floor: float
    """Root: the bounds of `watchers_of_all` are valid while `total` is at least this."""
    watchers_of_all: set[int]
    """Root: numbers of the pool nodes adjacent to any member."""


def find(element: Component) -> Component:
    """Return the root of `element`'s component, halving the path on the way."""
    parent = element.parent
    if parent is None:
        return element
    above = parent.parent
    while above is not None:
        element.parent = above
        element = above
        parent = element.parent
        if parent is None:
            return element
        above = parent.parent
    return parent


def union(a: Component, b: Component) -> Component:
    """Join two components, given by their roots, and return the new root."""
    if a is b:
        return a
    if a.members < b.members:
        a, b = b, a
    b.parent = a
    a.members += b.members
    a.total += b.total
    a.floor += b.floor  # a node adjacent to both relied on both
    if len(a.watchers_of_all) < len(b.watchers_of_all):
        a.watchers_of_all, b.watchers_of_all = b.watchers_of_all, a.watchers_of_all
    a.watchers_of_all |= b.watchers_of_all
    b.watchers_of_all.clear()
    return a


class EvictedComponents:
    """The relaxed evicted neighbourhood ẽ* of every storage.

    Leaving a component removes the storage's cost from it but no connection, so phantom connections remain,
    as in the paper.
    """

    def __init__(self, pool: dict[int, Any], due: set[int]) -> None:
        """due: receives the numbers of the `pool` nodes whose lower bound is no longer valid."""
        self._pool = pool
        self._due = due
        self._dead: list[Component] = []

    def evicted(self, node: Node) -> None:
        element = node.component
        if element is not None and not element.dormant:
            return
        self.settle()
        pending = [node]
        while pending:
            node = pending.pop()
            element = node.component or self._enter(node)
            if not element.dormant:
                continue
            link(node, element)
            root = find(element)
            for parent in node.inputs:
                other = parent.component
                if other is None:
                    continue
                if other.dormant:
                    pending.append(parent)  # it finds us among its dependents
                else:
                    root = union(root, find(other))
            for other in node.dependents.values() if node.dependents else ():
                if not other.gone:
                    root = union(root, find(other))

    def released(self, node: Node) -> None:
        if node.component is not None:
            return
        if depended_on(node):
            self.evicted(node)
            return
        self.settle()
        element = self._enter(node)
        for parent in node.inputs:
            if parent.component is not None and parent.component.dormant:
                element.above += parent.component.above
        if element.above > DORMANT:
            self.evicted(node)

    def _enter(self, node: Node) -> Component:
        element = Component(node, self._dead.append)
        element.parent = None
        element.above = element.members = 1
        element.total = element.cost
        element.floor = 0
        element.watchers_of_all = set()
        node.component = element
        return element

    def left(self, node: Node) -> None:
        """`node` was rematerialized, or died, or lost its recipe."""
        self.settle()
        element = node.component
        if element is not None:
            node.component = None
            self._leave(element)

    def settle(self) -> None:
        """Remove those that died. Deaths occur at any moment, so they are only queued."""
        while self._dead:
            self._leave(self._dead.pop())

    def projected_cost(self, node: Node, number: int) -> int:
        """Return c_0(S) + Σ cost over ẽ*(S)."""
        roots = {find(neighbour) for neighbour in self._evicted_neighbours(node)}
        return node.cost + sum(root.total for root in roots)

    def watched_cost(self, node: Node, number: int) -> tuple[int, float]:
        """Return the projected cost, and a lower bound of it that holds until `number` is put into `due`."""
        cost = node.cost
        lower: float = cost
        roots: list[Component] = []
        for neighbour in self._evicted_neighbours(node):
            watch(neighbour.watchers, number, self._pool)
            root = find(neighbour)
            if root in roots:
                continue
            roots.append(root)
            watch(root.watchers_of_all, number, self._pool)
            root.floor = max(root.floor, root.total * (1 - SLACK))
            cost += root.total
            lower += root.floor
        return cost, lower

    def next_use(self, node: Node, number: int, foresight: Foresight) -> int | None:
        """Return the node's own next use, since a component does not record which members are adjacent."""
        return foresight.next_use(node)

    def changed(self, number: int) -> None:
        """No effect: nothing is cached here."""

    def _evicted_neighbours(self, node: Node) -> list[Component]:
        neighbours: list[Component] = []
        for parent in node.inputs:
            element = parent.component
            if element is not None:
                neighbours.append(element)
                if element.dormant:
                    self._behind(parent, neighbours)
        if node.dependents:
            neighbours += [member for member in node.dependents.values() if not member.gone]
        return neighbours

    @staticmethod
    def _behind(node: Node, neighbours: list[Component]) -> None:
        """Add the non-resident storages that a dormant one is computed from."""
        seen = set(neighbours)
        pending = list(node.inputs)
        while pending:
            parent = pending.pop()
            element = parent.component
            if element is not None and element not in seen:
                seen.add(element)
                neighbours.append(element)
                if element.dormant:
                    pending.extend(parent.inputs)

    def _leave(self, element: Component) -> None:
        if element.gone:
            return
        element.gone = True
        self._due |= element.watchers
        element.watchers.clear()
        root = find(element)
        root.total -= element.cost
        if root.total < root.floor:
            self._due |= root.watchers_of_all
            root.watchers_of_all.clear()
            root.floor = 0
