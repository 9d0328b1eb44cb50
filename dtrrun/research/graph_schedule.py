"""A planner's graph (of grouped operators) as a schedule, so that DTR can run on the planners' input."""

from __future__ import annotations

from dtrrun.simulator.schedule import CONSTANT, Operator, Schedule

from .planners.graph import Graph


def schedule_of_graph(graph: Graph, name: str = "graph") -> Schedule:
    """Return a schedule in which node i is tensor and storage i. A node and its partners are one operator.

    A storage is released after its last reader runs, or after its own operator if nothing reads it; outputs
    are kept. An operator's workspace is what its nodes need together, beyond their sizes.
    """
    nodes = graph.nodes
    schedule = Schedule(name)
    count = len(nodes)
    schedule.storage_of = list(range(count))
    schedule.roots = list(range(count))
    schedule.nbytes = [node.size for node in nodes]
    schedule.operator_of = [0] * count

    def enter(operator: Operator) -> None:
        for made in operator.outputs:
            schedule.operator_of[made] = len(schedule.operators)
        schedule.events.append(len(schedule.operators))
        schedule.operators.append(operator)

    for index, node in enumerate(nodes):
        if node.constant:
            enter(Operator(CONSTANT, (), (index,), 0))
    last = [users[-1] if users else index for index, users in enumerate(graph.users)]
    for made in graph.runs:
        if graph.turn == made[0]:
            schedule.backward = len(schedule.events)
        sizes, need = 0, 0
        for index in made:
            sizes += nodes[index].size
            need = max(need, sizes + nodes[index].workspace)
        first = nodes[made[0]]
        reads = tuple(dict.fromkeys(first.inputs))
        enter(Operator(first.name or "operator", reads, made, first.cost, need - sizes))
        ran = set(made)
        gone = {*made, *reads}
        schedule.events += [~one for one in sorted(gone) if last[one] in ran and not _stays(graph, one)]
    schedule.outputs = [index for index, node in enumerate(nodes) if node.output or node.constant]
    return schedule


def _stays(graph: Graph, index: int) -> bool:
    return graph.nodes[index].output or graph.nodes[index].constant
