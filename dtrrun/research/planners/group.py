"""Groups operators, so that a planner that can handle only a few can plan a log of some hundred.

A group is a run of consecutive operators that is recomputed as a whole. Its values that are read outside are
kept or dropped in classes, by which groups read them; the rest live only while the group runs. Every plan of
the grouped graph gives one of the original (`Grouping.expand`) of at most that cost and peak. So the cheapest
grouped plan is only an upper bound on the optimum: a plan that stores something inside a group may be
cheaper. For lower bounds on large graphs, see `lower_bound`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .graph import Graph, Node
from .plan import Plan, missing_ancestors, with_frees


@dataclass(frozen=True)
class Grouping:
    original: Graph
    graph: Graph
    """The grouped graph: one node for all constants, then a node and its partners for each group."""
    members: tuple[tuple[int, ...], ...]
    """For each node of `graph`, the original nodes whose bytes it stands for."""
    everything: tuple[tuple[int, ...], ...]
    """For each node of `graph`, all original nodes of its group."""

    def expand(self, plan: Plan) -> Plan:
        """Return the plan of the original graph that a plan of the grouped graph stands for: feasible.

        It recomputes only the nodes of a group that are needed, and frees each as soon as possible.
        """
        computes: list[int] = []
        resident: set[int] = set()
        ran: set[tuple[int, ...]] = set()
        steps = plan.steps
        for position, (what, index) in enumerate(steps):
            if what == "free":
                resident -= set(self.members[index])
                continue
            if self.graph.nodes[index].partner is not None:
                continue  # done with the group's first node
            made = {*self.members[index]}
            for later_what, later in steps[position + 1 :]:
                if later_what == "compute":
                    if self.graph.nodes[later].partner != index:
                        break
                    made.update(self.members[later])
            group = self.everything[index]
            if group not in ran:
                ran.add(group)
                computes += group
            else:
                computes += missing_ancestors(self.original, made, resident)
            resident |= made
        return Plan(with_frees(self.original, computes), plan.planner, "feasible")


SHARES = (0.3, 0.5, 0.7, 0.85, 1.0)
"""Shares of the budget that a group may need at most. The least that gives few enough nodes is used."""


def group(graph: Graph, most_nodes: int, budget_bytes: int) -> Grouping:
    """Join neighbouring operators, where the loss is least, until the grouped graph has `most_nodes` nodes.

    Constants and outputs without a reader (weight gradients) are not counted: there is little to plan.
    Joining two groups loses the bytes kept of each times the cost of the other, which must then be paid to
    recompute them. The joined group needs the inputs of both at once, which, with the constants, must fit
    into a fraction of the budget. Groups do not span the turn from forward to backward pass. The result has
    more nodes than `most_nodes` if the budget allows no fewer.
    """
    room = budget_bytes - graph.constant_bytes
    for share in SHARES:
        groups, where = _join(graph, most_nodes, share * room)
        if _nodes(graph, groups, where) <= most_nodes:
            break
    return _grouped(graph, groups, where)


def _join(graph: Graph, most_nodes: int, most_bytes: float) -> tuple[list[list[int]], dict[int, int]]:
    groups = [list(made) for made in graph.runs]
    where = {node: k for k, made in enumerate(groups) for node in made}
    loss = [_loss(graph, groups, k, most_bytes) for k in range(len(groups) - 1)]
    while len(groups) > 1 and _nodes(graph, groups, where) > most_nodes:
        k = min(range(len(loss)), key=loss.__getitem__)
        if loss[k] == NEVER:
            break
        groups[k] += groups.pop(k + 1)
        del loss[k]
        where = {node: at for at, made in enumerate(groups) for node in made}
        for at in (k - 1, k):
            if 0 <= at < len(groups) - 1:
                loss[at] = _loss(graph, groups, at, most_bytes)
    return groups, where


NEVER = (float("inf"), float("inf"))


def _loss(graph: Graph, groups: Sequence[Sequence[int]], k: int, most_bytes: float) -> tuple[float, float]:
    one, other = groups[k], groups[k + 1]
    if one[0] < graph.turn <= other[0]:
        return NEVER
    joined = {*one, *other}
    need = _need(graph, [*one, *other])
    if need > most_bytes:
        return NEVER

    def kept(nodes: Sequence[int]) -> int:
        return sum(graph.nodes[i].size for i in nodes if _outside(graph, i, joined))

    def cost(nodes: Sequence[int]) -> int:
        return sum(graph.nodes[i].cost for i in nodes)

    return float(kept(one) * cost(other) + kept(other) * cost(one)), float(need)


def _need(graph: Graph, made: Sequence[int]) -> int:
    """Return the bytes that the group needs to run: what it reads, and its peak while keeping all that is
    read outside."""
    inside = set(made)
    inputs = {source for i in made for source in graph.reads[i]} - inside
    return _bytes(graph, inputs) + _peak(graph, made, {i for i in made if _outside(graph, i, inside)})


def _outside(graph: Graph, node: int, inside: set[int]) -> bool:
    return graph.nodes[node].output or any(user not in inside for user in graph.users[node])


def _classes(
    graph: Graph, made: Sequence[int], where: dict[int, int]
) -> dict[tuple[bool, tuple[int, ...]], list[int]]:
    """Return the nodes of a group that are outputs or read outside, by which groups read them."""
    here = where[made[0]]
    found: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for node in made:
        readers = tuple(sorted({where[user] for user in graph.users[node]} - {here}))
        if readers or graph.nodes[node].output:
            found.setdefault((graph.nodes[node].output, readers), []).append(node)
    return found


def _nodes(graph: Graph, groups: Sequence[Sequence[int]], where: dict[int, int]) -> int:
    counts = (sum(bool(readers) for _, readers in _classes(graph, made, where)) for made in groups)
    return sum(max(1, count) for count in counts)


def _grouped(graph: Graph, groups: Sequence[Sequence[int]], where: dict[int, int]) -> Grouping:
    constants = tuple(i for i, node in enumerate(graph.nodes) if node.constant)
    nodes: list[Node] = [Node(0, graph.constant_bytes, constant=True, name="constants")]
    members: list[tuple[int, ...]] = [constants]
    everything: list[tuple[int, ...]] = [()]
    stands_in = dict.fromkeys(constants, 0)
    turn = None
    for made in groups:
        if turn is None and made[0] >= graph.turn:
            turn = len(nodes)
        inside = set(made)
        inputs = sorted({stands_in[s] for i in made for s in graph.nodes[i].inputs if s not in inside})
        classes = _classes(graph, made, where)
        kept = sorted(classes.items(), key=lambda item: -_bytes(graph, item[1]))
        first = len(nodes)
        left = _peak(graph, made, {i for _, chosen in kept for i in chosen})
        for (output, _), chosen in kept or [((False, ()), [])]:
            size = _bytes(graph, chosen)
            left -= size
            name = f"{graph.nodes[made[0]].name} … {graph.nodes[made[-1]].name}"
            node = Node(0, size, (*inputs,), output=output, workspace=left, name=name)
            if len(nodes) == first:
                node = replace(node, cost=sum(graph.nodes[i].cost for i in made))
                left = sum(_bytes(graph, other) for _, other in kept) - size
            else:
                node = replace(node, inputs=(*inputs, first), partner=first)
            stands_in.update(dict.fromkeys(chosen, len(nodes)))
            nodes.append(node)
            members.append(tuple(chosen))
            everything.append(tuple(made))
    return Grouping(graph, Graph(tuple(nodes), turn), tuple(members), tuple(everything))


def _bytes(graph: Graph, nodes: Iterable[int]) -> int:
    return sum(graph.nodes[i].size for i in nodes)


def _peak(graph: Graph, made: Sequence[int], kept: set[int]) -> int:
    """Return the peak while the group runs, without what it reads: what is not kept is freed after its last
    reader."""
    inside = set(made)
    last = {i: max((user for user in graph.users[i] if user in inside), default=i) for i in made}
    used = peak = 0
    for index in made:
        node = graph.nodes[index]
        peak = max(peak, used + node.size + node.workspace)
        used += node.size
        used -= sum(
            graph.nodes[i].size for i in {*graph.reads[index], index} & inside - kept if last[i] == index
        )
    return max(peak, used)
