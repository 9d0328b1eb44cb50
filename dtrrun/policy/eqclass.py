"""ẽ*: evicted components in a union-find structure, with running sums (Sec. 4.1, App. C.2)."""

from __future__ import annotations

from typing import Any

from .evicted import Evicted, link, watch
from .node import Node

SLACK = 1 / 64
"""How far a component's cost may fall before the bounds that counted on it are renewed.

Wide: bounds are loose, more scores are computed per search. Narrow: more after rematerializations.
"""


class Component(Evicted):
    """An evicted storage as an element of the union-find forest; a root speaks for its component."""

    __slots__ = ("floor", "members", "parent", "total", "watchers_of_all")

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
        if node.component is not None:
            return
        self.settle()
        element = Component(node, self._dead.append)
        element.parent = None
        element.members = 1
        element.total = element.cost
        element.floor = 0
        element.watchers_of_all = set()
        node.component = root = element
        link(node, element)
        for neighbour in self._evicted_neighbours(node):
            root = union(root, find(neighbour))

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

    def changed(self, number: int) -> None:
        """Nothing is cached here."""

    def _evicted_neighbours(self, node: Node) -> list[Component]:
        neighbours = [parent.component for parent in node.inputs if parent.component is not None]
        if node.dependents:
            neighbours += [member for member in node.dependents.values() if not member.gone]
        return neighbours

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
