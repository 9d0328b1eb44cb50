"""Makes a plan cheaper by holding what fits into the budget instead of computing it again."""

from __future__ import annotations

from collections.abc import Sequence

from .graph import Graph


def fill(graph: Graph, computes: Sequence[int], budget_bytes: int) -> list[int]:
    """Remove recomputations for as long as there is room to hold the value from its last use instead.

    Those that save the most cost for the bytes and time held are removed first; after each, whatever was
    recomputed only for it is removed too. The order of the rest is unchanged, and its peaks grow at most to
    the budget. Frees are as early as possible (`with_frees`).
    """
    sequence = without_waste(graph, computes)
    room = budget_bytes - graph.constant_bytes
    while True:
        at = _best_to_hold(graph, sequence, room)
        if at is None:
            return sequence
        del sequence[at]
        sequence = without_waste(graph, sequence)


def without_waste(graph: Graph, computes: Sequence[int]) -> list[int]:
    """Return the sequence without unread recomputations. First computations stay, as every run needs them."""
    first: dict[int, int] = {}
    for position, index in enumerate(computes):
        first.setdefault(index, position)
    read = {i for i, node in enumerate(graph.nodes) if node.output}
    left: list[int] = []
    for position in range(len(computes) - 1, -1, -1):
        index = computes[position]
        if index in read or first[index] == position:
            read.discard(index)
            read.update(graph.reads[index])
            left.append(index)
    return left[::-1]


def _best_to_hold(graph: Graph, sequence: Sequence[int], room: int) -> int | None:
    last_use, used = _profile(graph, sequence)
    seen: dict[int, int] = {}
    found: list[tuple[float, int, int]] = []
    for position, index in enumerate(sequence):
        before = seen.get(index)
        seen[index] = position
        has_further = position + 1 < len(sequence) and graph.nodes[sequence[position + 1]].partner == index
        if before is None or has_further:
            continue
        start = max(before, last_use[before]) + 1
        node = graph.nodes[index]
        if max(used[start:position], default=0) + node.size <= room:
            first = node.partner
            saved = node.cost if first is None else graph.nodes[first].cost
            found.append((saved / ((node.size + 1) * (position - start + 1)), before, position))
    return max(found)[2] if found else None


def _profile(graph: Graph, sequence: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return, by position, the last one that reads its value (-1: none), and the bytes in use at it."""
    last_use = [-1] * len(sequence)
    freed: list[int] = [0] * len(sequence)
    current: dict[int, int] = {}
    for position, index in enumerate(sequence):
        for source in graph.reads[index]:
            last_use[current[source]] = position
        current[index] = position
    for position, index in enumerate(sequence):
        if current[index] == position and graph.nodes[index].output:
            continue
        freed[max(position, last_use[position])] += graph.nodes[index].size
    used, held = [], 0
    for position, index in enumerate(sequence):
        held += graph.nodes[index].size
        used.append(held + graph.nodes[index].workspace)
        held -= freed[position]
    return last_use, used
