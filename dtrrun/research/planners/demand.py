"""Runs a program within the budget with a policy that may look ahead."""

from __future__ import annotations

from collections.abc import Callable, Set

from .graph import Graph
from .plan import missing_ancestors

Worth = Callable[[int, int, Set[int]], tuple[float, ...]]
"""worth(t, node, resident): at run t of the program, the resident node of least worth is evicted first."""

PATIENCE = 30
"""An attempt is given up after computing more than this many times the number of nodes."""


def on_demand(graph: Graph, budget_bytes: int, worth: Worth) -> list[int] | None:
    """Return the nodes computed if the program runs within the budget, evicting by `worth` when it must.

    Return None if it does not fit, or thrashes.
    """
    room = budget_bytes - graph.constant_bytes
    outputs = {i for i, node in enumerate(graph.nodes) if node.output and not node.constant}
    done: list[int] = []
    resident: set[int] = set()
    for t in range(len(graph.runs) + 1):
        wanted = set(graph.runs[t]) if t < len(graph.runs) else outputs
        again = missing_ancestors(graph, wanted, resident)
        while again:
            if not _bring(graph, again, wanted, resident, room, worth, t, done):
                return None
            again = missing_ancestors(graph, wanted, resident)
            if len(done) > PATIENCE * len(graph):
                return None
        last = graph.runs[t][-1] if t < len(graph.runs) else len(graph)
        for i in list(resident):
            if i not in outputs and (not graph.users[i] or graph.users[i][-1] <= last):
                resident.remove(i)
    return done


def _bring(
    graph: Graph,
    again: list[int],
    wanted: set[int],
    resident: set[int],
    room: int,
    worth: Worth,
    t: int,
    done: list[int],
) -> bool:
    """Compute `again` in order, or as much of it as room allows; return False if a node cannot run at all.

    What the rest of `again` reads is evicted last, the last read first; then the rest is out of date.
    """
    nodes = graph.nodes
    last_use = {i: k for k, i in enumerate(again)}
    for k, index in enumerate(again):
        last_use.update(dict.fromkeys(graph.reads[index], k))
    locked = wanted | set(last_use)
    for k, index in enumerate(again):
        resident.discard(index)  # an operator that runs again for a further output
        need = nodes[index].size + nodes[index].workspace
        used = sum(nodes[i].size for i in resident)
        broken = False
        if used + need > room:
            first = sorted(resident - locked, key=lambda i: worth(t, i, resident))
            then = sorted((resident & locked) - set(graph.reads[index]), key=lambda i: -last_use.get(i, 0))
            for victim in (*first, *then):
                broken = broken or victim in locked
                resident.remove(victim)
                used -= nodes[victim].size
                if used + need <= room:
                    break
            else:
                return False
        done.append(index)
        resident.add(index)
        if broken:
            return True
        locked -= {i for i in (*graph.reads[index], index) if last_use[i] <= k and i not in wanted}
    return True
