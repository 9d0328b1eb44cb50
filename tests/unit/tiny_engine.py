"""A DTR engine in a few lines, with unit costs and sizes, for tests of code that takes an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TinyEngine:
    """Evicts the tensor with the least score(engine, tensor); by default the least recently used."""

    def __init__(self, budget: int, score: Callable[[TinyEngine, int], float] | None = None) -> None:
        self.budget = budget
        self.score = score or (lambda engine, tensor: engine.access[tensor])
        self.inputs: list[tuple[int, ...]] = []
        self.access: list[int] = []
        self.memory: set[int] = set()
        self.pinned: set[int] = set()
        self.released: set[int] = set()
        self.clock = 0
        self.cost = 0
        self.peak = 0

    def constant(self) -> int:
        self.inputs.append(())
        self.access.append(0)
        self.pinned.add(len(self.inputs) - 1)
        self._enter(len(self.inputs) - 1, set())
        return len(self.inputs) - 1

    def compute(self, inputs: Sequence[int]) -> int:
        self.inputs.append(tuple(inputs))
        self.access.append(0)
        self._run(len(self.inputs) - 1)
        return len(self.inputs) - 1

    def resident(self, handle: int) -> bool:
        return handle in self.memory

    def release(self, handle: int) -> None:
        self.released.add(handle)
        self._banish()

    def _run(self, tensor: int) -> None:
        stack = [tensor]
        locked: set[int] = set()
        while stack:
            top = stack[-1]
            missing = [i for i in self.inputs[top] if i not in self.memory]
            if missing:
                stack += missing
                continue
            stack.pop()
            if top in self.memory:
                continue
            self._enter(top, locked | set(self.inputs[top]))
            self.cost += 1
            below = stack[-1:]
            locked = {top} if below else set()
            for i in (*self.inputs[top], top):
                self.access[i] = self.clock = self.clock + 1
        self._banish()

    def _enter(self, tensor: int, locked: set[int]) -> None:
        while len(self.memory) >= self.budget:
            free = sorted(self.memory - locked - self.pinned)
            self.memory.remove(min(free, key=lambda i: self.score(self, i)))
        self.memory.add(tensor)
        self.peak = max(self.peak, len(self.memory))

    def _banish(self) -> None:
        """App. A: remove dead tensors whose children are all in memory or banished, and pin the children."""
        for dead in sorted(self.released):
            children = [i for i, inputs in enumerate(self.inputs) if dead in inputs]
            if all(i in self.memory or i in self.released for i in children):
                self.memory.discard(dead)
                self.pinned |= {i for i in children if i not in self.released}


def evicted_neighbourhood(engine: TinyEngine, tensor: int) -> float:
    """|e*(t)|: the evicted ancestors and descendants of t, through evicted tensors only (App. A)."""
    gone = set(range(len(engine.inputs))) - engine.memory - engine.released
    found: set[int] = set()
    up = list(engine.inputs[tensor])
    while up:
        i = up.pop()
        if i in gone and i not in found:
            found.add(i)
            up += engine.inputs[i]
    down = [tensor]
    while down:
        k = down.pop()
        for i in gone - found:
            if k in engine.inputs[i]:
                found.add(i)
                down.append(i)
    return len(found)
