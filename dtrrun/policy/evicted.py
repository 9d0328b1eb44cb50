"""Evicted storages, seen weakly: a record dies as soon as the program and its dependents let go of it.

A storage that the program has released is *dormant* as long as nothing that depends on it is evicted: nobody
is going to ask for it, so it is in no neighbourhood of what it was computed from. What depends on it counts
its cost, since it would have to be rematerialized first. (The paper counts a released storage as evicted at
once, and so an activation that was updated in place against the eviction of what it was computed from.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from typing import Any

from .node import Node


class Evicted(weakref.ref[Any]):
    """One evicted storage, from its eviction to its rematerialization or death.

    Its inputs find it in their `dependents`: weakly, since a parent must not keep its child alive.
    """

    __slots__ = ("cost", "dormant", "gone", "watchers")

    cost: int
    """c_0, as it was at the eviction."""
    dormant: bool
    """Not among the evicted dependents of its inputs yet."""
    gone: bool
    """Rematerialized or dead: whoever still finds it must pass it over."""
    watchers: set[int]
    """Numbers of pool nodes whose projected cost counts on this storage's being evicted."""

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
    """Whether something evicted is computed from `node`."""
    return bool(node.dependents) and any(not member.gone for member in node.dependents.values())


def link(node: Node, member: Evicted) -> None:
    """Enter `node` among the evicted dependents of its inputs (deps_e^T); it is dormant no longer."""
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
        if count >= 64 and not count & (count - 1):  # who is gone leaves an entry behind
            for stale in [k for k, other in dependents.items() if other.gone]:
                del dependents[stale]


def watch(watchers: set[int], number: int, pool: Container[int]) -> None:
    """Add `number`; when they have become many, drop those that have left the pool."""
    watchers.add(number)
    if len(watchers) >= 64 and not len(watchers) & (len(watchers) - 1):
        watchers -= {stale for stale in watchers if stale not in pool}
