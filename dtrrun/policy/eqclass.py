"""ẽ*: evicted components in a union-find structure, with running sums (Sec. 4.1, App. C.2)."""

from __future__ import annotations

from typing import Any

from .evicted import Evicted, depended_on, link, watch
from .foresight import Foresight
from .node import Node

SLACK = 1 / 64
"""How far a component's cost may fall before the bounds that counted on it are renewed.

Wide: bounds are loose, more scores are computed per search. Narrow: more after rematerializations.
"""

DORMANT = 64
"""How many dormant storages a projected cost may count; beyond, they are joined as evicted ones are."""


class Component(Evicted):
    """An evicted storage as an element of the union-find forest; a root speaks for its component.

    A dormant one is a component by itself.
    """

    __slots__ = ("above", "floor", "members", "parent", "total", "watchers_of_all")

    above: int
    """Dormant: how many dormant storages it is computed from, itself included; an upper bound."""

    parent: Component | None
    members: int
    total: int
    """Root: the sum of the members' costs."""
    floor: float
    """Root: `watchers_of_all` hold bounds that are valid while `total` is not below this."""
    watchers_of_all: set[int]
    """Root: numbers of the pool nodes beside any member."""


def find(element: Component) -> Component:
    """The root of `element`'s component, halving the path on the way."""
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
    """Join two components, given by their roots; returns the root of both."""
    if a is b:
        return a
    if a.members < b.members:
        a, b = b, a
    b.parent = a
    a.members += b.members
    a.total += b.total
    a.floor += b.floor  # who is beside both counted on both
    if len(a.watchers_of_all) < len(b.watchers_of_all):
        a.watchers_of_all, b.watchers_of_all = b.watchers_of_all, a.watchers_of_all
    a.watchers_of_all |= b.watchers_of_all
    b.watchers_of_all.clear()
    return a


class EvictedComponents:
    """The relaxed evicted neighbourhood ẽ* of every storage.

    Leaving a component removes the storage's cost from it but no connection, so phantom connections
    stay, as in the paper.
    """

    def __init__(self, pool: dict[int, Any], due: set[int]) -> None:
        """`due`: gets the numbers of the `pool` nodes whose lower bound is no longer one."""
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
        """Take those out that died unannounced: deaths come at any moment, so they only queue up."""
        while self._dead:
            self._leave(self._dead.pop())

    def projected_cost(self, node: Node, number: int) -> int:
        """c_0(S) + Σ cost over ẽ*(S)."""
        roots = {find(neighbour) for neighbour in self._evicted_neighbours(node)}
        return node.cost + sum(root.total for root in roots)

    def watched_cost(self, node: Node, number: int) -> tuple[int, float]:
        """The projected cost, and a lower bound of it that holds until `number` is put into `due`."""
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
        """A component does not tell who is beside whom, so this is the node's own."""
        return foresight.next_use(node)

    def changed(self, number: int) -> None:
        """Nothing is cached here."""

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
        """Add what a dormant storage is computed from and is not in memory either."""
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
