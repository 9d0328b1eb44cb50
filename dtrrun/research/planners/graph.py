"""A computation as static planners see it: nodes in the order in which the program runs them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Node:
    """One operator and the storage it makes."""

    cost: int
    """Time in ns, or in any other unit that the caller uses."""
    size: int
    """Bytes of its output."""
    inputs: tuple[int, ...] = ()
    """Indices of the nodes that it reads, all before it."""
    constant: bool = False
    """An input or a weight: resident from the beginning to the end, costs nothing."""
    output: bool = False
    """Must be resident at the end."""
    workspace: int = 0
    """Bytes that it needs only while it is computed, besides its output."""
    name: str = ""
    partner: int | None = None
    """For a further output of an operator: the node of the first output, which it follows directly.

    It reads that node and what the operator reads, costs nothing, and is only computed right after that node.
    """


@dataclass(frozen=True)
class Graph:
    """Nodes in the program's order. Raises ValueError if one reads a later one, and the like."""

    nodes: tuple[Node, ...]
    backward: int | None = None
    """Index of the first node of the backward pass, if the caller knows it; see `turn`."""

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            if not all(0 <= source < index for source in node.inputs):
                raise ValueError(f"node {index} reads {node.inputs}: only what comes before it can be read")
            if min(node.cost, node.size, node.workspace) < 0:
                raise ValueError(f"node {index}: a cost or size below zero")
            if node.constant and (node.inputs or node.cost):
                raise ValueError(f"node {index}: a constant has no inputs and no cost")
            if node.partner is not None:
                first = node.partner
                follows = first == index - 1 or (index > 0 and self.nodes[index - 1].partner == first)
                if not follows or first not in node.inputs or node.cost:
                    raise ValueError(f"node {index}: not a further output of {first}")

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes that read it, in order."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for source in sorted(set(node.inputs)):
                found[source].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def operators(self) -> tuple[int, ...]:
        """The nodes that are not constant."""
        return tuple(i for i, node in enumerate(self.nodes) if not node.constant)

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """The operators' runs in order: for each, the nodes that it makes at once."""
        found: list[list[int]] = []
        for index in self.operators:
            if self.nodes[index].partner is None:
                found.append([])
            found[-1].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the operators that it reads: its inputs without constants, each once."""
        return tuple(
            tuple(sorted({s for s in node.inputs if not self.nodes[s].constant})) for node in self.nodes
        )

    @cached_property
    def constant_bytes(self) -> int:
        return sum(node.size for node in self.nodes if node.constant)

    @cached_property
    def total_cost(self) -> int:
        """The cost of computing every node once: what a run without a budget costs."""
        return sum(node.cost for node in self.nodes)

    @cached_property
    def turn(self) -> int:
        """The first node of the backward pass.

        `backward` if it is known, else the node after the one at which the most bytes wait for a later
        use: activations pile up until the forward pass ends, and are used up after that.
        """
        if self.backward is not None:
            return self._after_the_run(self.backward)
        freed_after: list[int] = [0] * len(self)
        live, most, where = 0, -1, 0
        for index in self.operators:
            node, users = self.nodes[index], self.users[index]
            if users or node.output:
                live += node.size
                if not node.output:
                    freed_after[users[-1]] += node.size
            live -= freed_after[index]
            if live > most:
                most, where = live, index
        return self._after_the_run(where + 1)

    def _after_the_run(self, index: int) -> int:
        while index < len(self) and self.nodes[index].partner is not None:
            index += 1
        return index


class Operator(NamedTuple):
    """A call as in a log, for `from_operators`. Keys identify storages."""

    cost: int
    reads: Iterable[Hashable]
    writes: Mapping[Hashable, int]
    """New storages and their bytes; empty for a call that only makes views of the first storage it reads."""
    name: str = ""


def from_operators(
    constants: Mapping[Hashable, int],
    operators: Iterable[Operator],
    outputs: Iterable[Hashable] = (),
    backward: int | None = None,
) -> Graph:
    """Return the graph of a log: a node per constant storage, then one per call that makes storages.

    A call with several outputs is a node for the largest and partners of it for the others; running it takes
    memory for all of them. A call that only makes views has its cost added to the node it views (cost(S) of
    App. C.2). `outputs`: storages needed at the end (App. C.6). `backward`: how many of the operators come
    before the backward pass, if that is known.
    """
    nodes: list[Node] = []
    made_by: dict[Hashable, int] = {}
    for key, size in constants.items():
        made_by[key] = len(nodes)
        nodes.append(Node(0, size, constant=True, name=str(key)))
    turn = None
    for number, operator in enumerate(operators):
        if number == backward:
            turn = len(nodes)
        reads = tuple(dict.fromkeys(made_by[key] for key in operator.reads))
        if operator.writes:
            first, left = len(nodes), sum(operator.writes.values())
            for key, size in sorted(operator.writes.items(), key=lambda written: -written[1]):
                made_by[key] = index = len(nodes)
                left -= size
                if index == first:
                    node = Node(operator.cost, size, tuple(sorted(reads)), workspace=left, name=operator.name)
                else:
                    inputs = (*sorted(reads), first)
                    node = Node(0, size, inputs, workspace=left, name=operator.name, partner=first)
                nodes.append(node)
        elif reads and not nodes[reads[0]].constant:
            viewed = nodes[reads[0]]
            if viewed.partner is not None:
                made = nodes[viewed.partner]
                nodes[viewed.partner] = replace(made, cost=made.cost + operator.cost)
            else:
                nodes[reads[0]] = replace(viewed, cost=viewed.cost + operator.cost)
    for key in outputs:
        index = made_by[key]
        if not nodes[index].constant:
            nodes[index] = replace(nodes[index], output=True)
    return Graph(tuple(nodes), turn)


def chain(
    layers: int,
    costs: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    gradient_costs: Sequence[int] | None = None,
    *,
    loss: bool = False,
) -> Graph:
    """Return the linear feedforward network of App. A: t_1 … t_N, then t̂_N … t̂_1, t̂_i = f̂_i(t_{i-1},
    t̂_{i+1}).

    costs, sizes: of t_1 … t_N, 1 each by default; t̂_i has the size of t_i, and its cost unless
    `gradient_costs` says otherwise. `loss` adds t̂_{N+1}, computed from t_N, with the cost and size of t̂_N:
    then reversing each layer takes the same memory, which Griewank and Walther assume; App. A leaves it out.
    The input t_0 takes no memory, so it has no node.
    """
    if layers < 1:
        raise ValueError("a chain has at least one layer")
    costs = list(costs or [1] * layers)
    sizes = list(sizes or [1] * layers)
    back = list(gradient_costs or costs)
    if not len(costs) == len(sizes) == len(back) == layers:
        raise ValueError(
            f"{layers} layers, but {len(costs)} costs, {len(sizes)} sizes, {len(back)} gradient costs"
        )
    nodes = [Node(costs[i], sizes[i], (i - 1,) if i else (), name=f"t{i + 1}") for i in range(layers)]
    gradient: tuple[int, ...] = ()
    if loss:
        nodes.append(Node(back[-1], sizes[-1], (layers - 1,), name=f"t^{layers + 1}"))
        gradient = (len(nodes) - 1,)
    for i in reversed(range(layers)):
        inputs = ((i - 1,) if i else ()) + gradient
        nodes.append(Node(back[i], sizes[i], inputs, output=i == 0, name=f"t^{i + 1}"))
        gradient = (len(nodes) - 1,)
    return Graph(tuple(nodes), backward=layers)


def residual(blocks: int, *, cost: int = 10, add_cost: int = 1, size: int = 1) -> Graph:
    """Return a residual network with its backward pass: each block is x' = g(f(x)) + x.

    f and g cost `cost` each, and so do their gradients ĝ(f(x), dx') and f̂(x, ·); an addition costs
    `add_cost`; every value has `size` bytes.
    """
    if blocks < 1:
        raise ValueError("at least one block")
    nodes = [Node(cost, size, name="x0")]
    saved: list[tuple[int, int]] = []
    x = 0
    for _ in range(blocks):
        inner = len(nodes)
        nodes.append(Node(cost, size, (x,), name="f"))
        nodes.append(Node(cost, size, (inner,), name="g"))
        nodes.append(Node(add_cost, size, (x, inner + 1), name="+"))
        saved.append((x, inner))
        x = inner + 2
    turn = len(nodes)
    nodes.append(Node(cost, size, (x,), name="loss^"))
    gradient = turn
    for x, inner in reversed(saved):
        first = len(nodes)
        nodes.append(Node(cost, size, (inner, gradient), name="g^"))
        nodes.append(Node(cost, size, (x, first), name="f^"))
        nodes.append(Node(add_cost, size, (gradient, first + 1), name="+^"))
        gradient = first + 2
    nodes.append(Node(cost, size, (gradient,), output=True, name="x0^"))
    return Graph(tuple(nodes), backward=turn)
