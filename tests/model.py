"""The policy as the paper defines it, without caches and bounds: what `dtrrun/core/policy` must choose.

It must be notified of events, like a policy (`dtrrun.core.backend.Policy`). Each choice scores all nodes, and
each score follows the definitions of Sec. 4.1 and App. C, so it is slow but literal. Additions to the
paper:

- What the program has released is *dormant* while nothing evicted is computed from it: it adds to the cost of
  what depends on it, and is in no other neighbourhood (`core/policy/evicted.h`).
- A neighbourhood ẽ* goes no further than to `DORMANT` dormant storages; beyond that they count as evicted.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dtrrun.core.foresight import Foresight, Rescued
from dtrrun.core.heuristics import Heuristic

DORMANT = 64


class Node:
    def __init__(self, name: int, nbytes: int, cost: int, now: int = 0, inputs: Iterable[Node] = ()) -> None:
        self.name, self.nbytes, self.cost, self.last_access = name, nbytes, cost, now
        self.inputs: list[Node] | None = list(inputs)
        """None: a constant."""
        self.age = 0
        self.resident = True
        self.released = False


class Absent:
    """A storage without memory."""

    def __init__(self, node: Node) -> None:
        self.node = weakref.ref(node)
        self.cost = node.cost
        self.inputs = [id(source) for source in node.inputs or ()]
        self.dormant = True
        self.depth = 1  # at least the number of dormant storages it is computed from, itself included
        self.component: list[Absent] = [self]  # of ẽ*, shared by all of its members


class ModelForesight(Foresight):
    """Also says when storages are used, as `bindings/foresight.h` must."""

    def next_use(self, node: Any) -> int | None:
        """Return when the program uses `node` next; None if it does not.

        For unknown nodes, return half a step ahead.
        """
        position = self.position
        assert position is not None
        if node.age <= self._begin:
            return None
        known = getattr(node, "uses", None)
        if known is None or (known and known[0] is not self._stretches[-1]):
            known = node.uses = self._stretches[-1], self._uses_of(node)
        if not known:
            return None
        uses = known[1]
        if uses is None:
            return position + self.horizon // 4
        place = bisect_right(uses, position)
        if place == len(uses) - 1 and type(uses) is Rescued and node.resident:
            return position
        return uses[place] if place < len(uses) else None

    def _uses_of(self, node: Any) -> Sequence[int] | None:
        stretches = self._stretches
        stretch = stretches[bisect_right(stretches, node.age, key=lambda one: one.age) - 1]
        if stretch.step is None:
            return None
        return stretch.step.uses_of(node.age - stretch.origin - 1, node.nbytes)


class ModelPolicy:
    def __init__(self, heuristic: Heuristic, latest: bool = False) -> None:
        self.heuristic, self._latest = heuristic, latest
        self.foresight: ModelForesight | None = None
        self._copy_cost: Callable[[Node], int | None] = lambda _: None
        self._pool: list[Node] = []
        self._absent: dict[int, Absent] = {}

    def __len__(self) -> int:
        return len(self._pool)

    def __iter__(self) -> Any:
        return iter(list(self._pool))

    @property
    def nbytes(self) -> int:
        return sum(node.nbytes for node in self._pool)

    # -- events ----------------------------------------------------------------------------------

    def insert(self, node: Node) -> None:
        if node.nbytes and all(one is not node for one in self._pool):
            self._pool.append(node)

    def discard(self, node: Node) -> None:
        self._pool = [one for one in self._pool if one is not node]

    def evicted(self, node: Node) -> None:
        self.discard(node)
        if node.inputs is not None:
            self._evict(node)

    def released(self, node: Node) -> None:
        self.discard(node)
        if node.inputs is None or self._of(node) is not None:
            return
        if self._children(node):
            self._evict(node)
            return
        entered = self._enter(node)
        for source in node.inputs:
            above = self._of(source)
            entered.depth += above.depth if above is not None and above.dormant else 0
        if self.heuristic.neighbourhood == "eqclass" and entered.depth > DORMANT:
            self._evict(node)

    def rematerialized(self, node: Node) -> None:
        self._leave(id(node))

    forget = rematerialized

    def cost_changed(self, node: Node) -> None:
        pass

    def let_copy(self, cost: Callable[[Node], int | None]) -> None:
        self._copy_cost = cost

    def _enter(self, node: Node) -> Absent:
        key = id(node)
        weakref.finalize(node, self._leave, key)
        return self._absent.setdefault(key, Absent(node))

    def _leave(self, key: int) -> None:
        gone = self._absent.pop(key, None)
        if gone is not None:
            gone.component.remove(gone)  # the others stay connected, as in the paper

    def _evict(self, node: Node) -> None:
        """Mark a node, and everything dormant that it is computed from, as needing rematerialization."""
        own = self._of(node) or self._enter(node)
        if not own.dormant:
            return
        own.dormant = False
        above = [found for source in node.inputs or () if (found := self._of(source)) is not None]
        for other in [one for one in above if not one.dormant] + self._children(node):
            if other.component is not own.component:
                own.component += other.component
                for member in list(own.component):
                    member.component = own.component
        for source in node.inputs or ():
            found = self._of(source)
            if found is not None and found.dormant:
                self._evict(source)

    # -- neighbourhoods --------------------------------------------------------------------------

    def _of(self, node: Node) -> Absent | None:
        return self._absent.get(id(node))

    def _children(self, node: Node) -> list[Absent]:
        """Return the evicted dependents of a node."""
        if node.inputs is None:
            return []
        return [one for one in self._absent.values() if not one.dormant and id(node) in one.inputs]

    def _ancestors(self, node: Node, through: Callable[[Absent], bool] = lambda _: True) -> list[Absent]:
        """Return all absent ancestors of a node that a chain of absent storages leads to."""
        found: list[Absent] = []
        pending = list(node.inputs or ())
        while pending:
            source = pending.pop()
            one = self._of(source)
            if one is not None and one not in found:
                found.append(one)
                if through(one):
                    pending += source.inputs or ()
        return found

    def _descendants(self, node: Node) -> list[Absent]:
        found: list[Absent] = []
        pending = [node]
        while pending:
            for one in self._children(pending.pop()):
                storage = one.node()
                if one not in found and storage is not None:
                    found.append(one)
                    pending.append(storage)
        return found

    def neighbourhood(self, node: Node) -> list[Absent]:
        kind = self.heuristic.neighbourhood
        if kind == "ancestors":
            return self._ancestors(node)
        if kind == "e_star":
            above = self._ancestors(node)
            return above + [one for one in self._descendants(node) if one not in above]
        if kind == "none":
            return []
        beside = self._ancestors(node, lambda one: one.dormant) + self._children(node)
        components = {id(one.component): one.component for one in beside}
        return [member for component in components.values() for member in component]

    def projected_cost(self, node: Node) -> int:
        if not any(one is node for one in self._pool):
            return node.cost
        return node.cost + sum(one.cost for one in self.neighbourhood(node))

    # -- scores ----------------------------------------------------------------------------------

    def select(self, now: int, evictable: Callable[[Node], bool]) -> Node | None:
        if self.foresight is not None:
            self.foresight.look()
        pool = list(reversed(self._pool) if self._latest else self._pool)
        scores = [self.score(node, now) for node in pool]
        for place in sorted(range(len(pool)), key=scores.__getitem__):
            if pool[place].resident and evictable(pool[place]):
                return pool[place]
        return None

    def score(self, node: Node, now: int) -> float:
        staleness, cost = max(now - node.last_access, 1), self.projected_cost(node)
        copy = self._copy_cost(node)
        cost = cost if copy is None else min(cost, copy)
        heuristic = self.heuristic
        if heuristic.powers is None:
            assert heuristic.score is not None
            return heuristic.score(node.nbytes, staleness, node.cost, cost)
        of_cost, of_size, of_staleness = heuristic.powers
        score = (cost if of_cost else 1) / ((node.nbytes if of_size else 1) * staleness**of_staleness)
        factor = (
            heuristic.released if node.released else 1.0
        )  # a separate factor, so that it is rounded as in the core
        if self.foresight is not None and self.foresight.position is not None:
            following = self._next_use(node, self.foresight)
            away = self.foresight.horizon if following is None else following - self.foresight.position
            factor /= max(away, 1) ** heuristic.foresight
        return score * factor

    def _next_use(self, node: Node, foresight: ModelForesight) -> int | None:
        nodes = [node]
        if self.heuristic.neighbourhood in ("ancestors", "e_star"):  # an evicted descendant's use counts, too
            nodes += [found for one in self._descendants(node) if (found := one.node()) is not None]
        return min((time for one in nodes if (time := foresight.next_use(one)) is not None), default=None)
