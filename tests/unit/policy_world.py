"""A small world of storages and of events that happen to them, for the policy's tests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from dtrrun.bindings import graph, make_policy
from dtrrun.core.backend import Policy
from dtrrun.core.foresight import Foresight, WatchedStep
from dtrrun.core.heuristics import make_heuristic
from tests.model import ModelForesight, ModelPolicy, Node


class Storage:
    """Stands for a version's storage."""


class Nodes:
    """Makes the nodes of the core."""

    foresight = Foresight

    def __init__(self) -> None:
        self._graph = graph()

    def make(self, name: int, nbytes: int, cost: int, now: int = 0, inputs: Sequence[Any] = ()) -> Any:
        node = self._graph.new_version(Storage(), None, nbytes, name + 1, now)
        node.key, node.cost = name, cost
        node.operation = self._graph.new_operation(None, self._graph.signature(None, ()), (), tuple(inputs))
        return node

    def constant(self, name: int) -> Any:
        return self._graph.new_version(Storage(), None, 8, name + 1, 0)

    @staticmethod
    def name_of(node: Any) -> int:
        return int(node.key)

    @staticmethod
    def add_input(node: Any, source: Any) -> None:
        node.operation.inputs = (*node.operation.inputs, source)

    @staticmethod
    def set_released(node: Any) -> None:
        node.scratch = "memory of its own"


class ModelNodes:
    """Makes the nodes of the model."""

    foresight = ModelForesight

    @staticmethod
    def make(name: int, nbytes: int, cost: int, now: int = 0, inputs: Sequence[Node] = ()) -> Node:
        node = Node(name, nbytes, cost, now, inputs)
        node.age = name + 1
        return node

    def constant(self, name: int) -> Node:
        node = self.make(name, 8, 0)
        node.inputs = None
        return node

    @staticmethod
    def name_of(node: Node) -> int:
        return node.name

    @staticmethod
    def add_input(node: Node, source: Node) -> None:
        assert node.inputs is not None
        node.inputs.append(source)

    @staticmethod
    def set_released(node: Node) -> None:
        node.released = True


class World:
    """Applies events to nodes and to the policy that watches them.

    `held` is what the program still references; what it drops dies unless a node reads it. To foresight, the
    world is a program in which each operator makes one storage.
    """

    def __init__(
        self, policy: Any, nodes: Any, steps: Sequence[WatchedStep] = (), constants: int = 2
    ) -> None:
        self.policy, self.nodes = policy, nodes
        self.now = self.age = 0
        self.held: dict[int, Any] = {name: nodes.constant(name) for name in range(constants)}
        self.constants = self.count = constants
        self.made: list[tuple[int, str, int]] = []
        if policy.heuristic.foresight:
            policy.foresight = nodes.foresight(self, steps)

    def made_last(self) -> Iterator[tuple[int, str, int]]:
        return reversed(self.made)

    def get(self, index: int) -> tuple[int, Any]:
        name = sorted(self.held)[index % len(self.held)]
        return name, self.held[name]

    def tick(self, amount: int) -> None:
        self.now += amount

    def make(self, nbytes: int, cost: int, inputs: Sequence[int], operator: str = "some") -> None:
        sources = [self.get(i)[1] for i in inputs]
        node = self.held[self.count] = self.nodes.make(self.count, nbytes, cost, self.now, sources)
        self.count += 1
        self.age = self.count
        self.made.append((self.age, operator, nbytes))
        if not self.count % 5:
            self.nodes.set_released(node)
        self.policy.insert(node)

    def access(self, index: int) -> None:
        self.get(index)[1].last_access = self.now

    def evict(self, index: int) -> None:
        name, node = self.get(index)
        if node.resident and name >= self.constants:
            node.resident = False
            self.policy.evicted(node)

    def bring_back(self, index: int) -> None:
        _, node = self.get(index)
        if not node.resident:
            node.resident = True
            node.last_access = self.now
            self.policy.rematerialized(node)
            self.policy.insert(node)

    def pin(self, index: int) -> None:
        self.policy.discard(self.get(index)[1])

    def unpin(self, index: int) -> None:
        name, node = self.get(index)
        if node.resident and name >= self.constants:
            self.policy.insert(node)

    def change_cost(self, index: int, cost: int) -> None:
        name, node = self.get(index)
        if node.resident and name >= self.constants:
            node.cost = cost
            self.policy.cost_changed(node)

    def add_input(self, index: int, other: int) -> None:
        """Mutate a resident storage using another: its recipe gains an input."""
        (name, node), (older, source) = self.get(index), self.get(other)
        if node.resident and source.resident and self.constants <= name and older < name:
            self.nodes.add_input(node, source)
            self.policy.cost_changed(node)

    def drop(self, index: int, announced: bool) -> None:
        """Drop the program's reference: the node dies if resident, else when nothing reads it any more."""
        name, node = self.get(index)
        if name < self.constants:
            return
        del self.held[name]
        if node.resident:
            self.policy.discard(node)
        elif announced:
            self.policy.forget(node)

    def release(self, index: int) -> None:
        """Drop the program's reference to a storage that recipes still read: its node stays alive."""
        name, node = self.get(index)
        if name < self.constants:
            return
        del self.held[name]
        if not node.resident:
            self.policy.forget(node)
        node.resident = False
        self.policy.released(node)

    def let_copy(self, latency: int, for_each: int) -> None:
        """Let two of three nodes be copied, at this cost and so much more for each byte."""

        def cost(node: Any) -> int | None:
            return latency + for_each * node.nbytes if self.nodes.name_of(node) % 3 else None

        self.policy.let_copy(cost)

    def begin(self) -> None:
        """Begin a step."""
        if self.policy.foresight is not None:
            self.policy.foresight.begin()

    def select(self, refused: int, evict: bool) -> int | None:
        """Return the chosen node's name; every seventh name from `refused` on is locked."""
        asked: list[int] = []

        def evictable(node: Any) -> bool:
            asked.append(self.nodes.name_of(node))
            return asked[-1] % 7 != refused

        chosen = self.policy.select(self.now, evictable)
        assert len(asked) == len(set(asked)), "a node was asked about twice"
        if chosen is None:
            return None
        assert asked[-1] == self.nodes.name_of(chosen)
        assert chosen.resident
        if evict:
            chosen.resident = False
            self.policy.evicted(chosen)
        return asked[-1]

    def seen(self) -> Any:
        costs = {name: self.policy.projected_cost(node) for name, node in self.held.items()}
        return costs, len(self.policy), self.policy.nbytes, [self.nodes.name_of(one) for one in self.policy]


EVENTS = {
    "make": 30,
    "select": 20,
    "bring_back": 10,
    "tick": 12,
    "access": 8,
    "evict": 5,
    "release": 5,
    "drop": 5,
    "pin": 1,
    "unpin": 1,
    "change_cost": 2,
    "add_input": 2,
    "begin": 1,
    "let_copy": 1,
    "seen": 1,
}


class Script:
    """A random program, mostly following one of two recorded steps. `unit` scales times, sizes and costs."""

    def __init__(self, draw: random.Random, unit: int) -> None:
        self.draw, self.unit = draw, unit
        self.lines = [[self.line() for _ in range(80)] for _ in range(2)]
        self.steps = [self.watched(lines) for lines in self.lines]
        self.step, self.place = 0, -1

    def line(self) -> tuple[str, int]:
        return f"op{self.draw.randrange(6)}", self.draw.choice([0, 1, 20, 20, 64, 5000]) * self.unit

    def watched(self, lines: list[tuple[str, int]]) -> WatchedStep:
        step, made = WatchedStep(), list[tuple[int, int]]()
        for place, (name, nbytes) in enumerate(lines):
            used = self.draw.sample(made, min(len(made), 3)) + made[-2:]
            made.append((place + 1, nbytes))
            other = self.draw.choice([nbytes, nbytes, 7 * self.unit])
            step.add(place + 1, name, self.draw.randint(0, 90) * self.unit, used, {nbytes, other})
        lost = self.draw.sample(made, 20)
        step.end(lambda _: rescued(lost))
        return step

    def event(self) -> tuple[str, Sequence[Any]]:
        """Return an event as (method of World, arguments); the mix keeps some tens of nodes alive."""
        draw, any_node = self.draw, self.draw.randrange(10**6)
        (what,) = draw.choices(list(EVENTS), list(EVENTS.values()))
        if what == "make":
            if draw.random() < 0.03:
                self.step, self.place = draw.randrange(2), draw.randrange(80)  # jump to another place
            self.place = (self.place + 1) % 80
            name, nbytes = self.line() if draw.random() < 0.02 else self.lines[self.step][self.place]
            inputs = [draw.randrange(10**6) for _ in range(draw.choice([0, 1, 1, 2, 2, 3]))]
            return what, (nbytes, draw.choice([0, 1, 5, 5, 30, 1000, 9001]) * self.unit, inputs, name)
        if what == "select":
            return what, (draw.randrange(9), draw.random() < 0.8)
        if what == "tick":
            return what, (draw.choice([1, 1, 10, 100, 5000]) * self.unit + draw.randrange(2),)
        if what == "drop":
            return what, (any_node, draw.random() < 0.5)
        if what == "change_cost":
            return what, (any_node, draw.choice([0, 7, 500]) * self.unit)
        if what == "add_input":
            return what, (any_node, draw.randrange(10**6))
        if what == "let_copy":
            return what, (draw.choice([0, 20, 500]) * self.unit, draw.choice([0, 1, 50]))
        if what == "begin":
            self.step, self.place = draw.randrange(2), -1
        return what, () if what in ("begin", "seen") else (any_node,)


def rescued(made: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """Yield nodes for the storages that become constant when weights change."""
    for age, nbytes in made:
        node = Node(0, nbytes, 0)
        node.age = age
        yield node


def play(worlds: Sequence[World], script: Script, events: int) -> None:
    """Play the same events in all worlds: the results must be the same."""
    for number in range(events):
        what, arguments = script.event()
        results = [getattr(world, what)(*arguments) for world in worlds]
        assert results[1:] == results[:-1], (number, what)


def core_world(name: str, steps: Sequence[WatchedStep] = (), **options: Any) -> World:
    policy: Policy = make_policy(name, **options)
    return World(policy, Nodes(), steps)


def model_world(name: str, steps: Sequence[WatchedStep] = (), latest: bool = False, seed: int = 0) -> World:
    return World(ModelPolicy(make_heuristic(name, seed), latest), ModelNodes(), steps)
