"""A graph as a chain of blocks, which Treeverse and the dynamic program plan.

Block k is the forward nodes after articulation point c_{k-1} up to c_k, and its phase is the part of the
backward pass that reads them; c_{k-1} is read by block k and its phase. Phases run from the last to the
first. Where the backward pass does not have this form, blocks are joined until it does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .graph import Graph
from .plan import NotApplicable
from .segments import cuts


class Choice(NamedTuple):
    checkpoint: int | None
    """k: run blocks s to k, keep c_k, reverse k + 1 to t, then s to k. None: keep all of block s."""
    right: int
    left: int


@dataclass(frozen=True)
class Block:
    """Bytes exclude the constants, c_{k-1} and the values that other blocks keep."""

    everything: tuple[int, ...]
    """All of its forward nodes."""
    advance: tuple[int, ...]
    """The forward nodes that c_k needs."""
    reverse: tuple[int, ...]
    """The forward nodes that its phase needs; empty where c_{k-1} is enough, as in App. A."""
    phase: tuple[int, ...]
    """Its backward nodes."""
    saved: tuple[int, ...]
    """The values of the block that its phase reads."""
    end: int
    """c_k."""
    end_size: int
    saved_size: int
    """Bytes of c_k and `saved` together."""
    advance_cost: int
    all_cost: int
    """Cost of the nodes that c_k or the phase needs."""
    reverse_cost: int
    phase_cost: int
    all_peak: int
    """Peak while everything runs, keeping c_k and `saved`."""
    advance_peak: int
    """Peak while everything runs, keeping c_k."""
    reverse_peak: int
    phase_peak: int
    """Peak while its phase runs, with the gradients that were resident before it."""
    gradients: int
    """Bytes of backward values that are alive when its phase begins."""


def blocks(graph: Graph) -> list[Block]:
    """Return the chain of blocks. Raises NotApplicable for a graph without a forward or a backward pass."""
    turn = graph.turn
    forward = [i for i in graph.operators if i < turn]
    backward = [i for i in graph.operators if i >= turn]
    if not forward or not backward:
        raise NotApplicable("not a forward pass with a backward pass")
    ends = cuts(graph)
    if ends[-1] != forward[-1]:
        ends.append(forward[-1])
    phases = _phases(graph, ends, backward)
    after = len(graph)  # the start of block k's phase or, if that is empty, of the next one to run
    starts = []
    for phase in phases:
        after = phase[0] if phase else after
        starts.append(after)
    return [_block(graph, ends, k, phases[k], starts[k]) for k in range(len(ends))]


def _phases(graph: Graph, ends: list[int], backward: Sequence[int]) -> list[list[int]]:
    """Return the backward nodes of each block; remove `ends` until each node belongs to one block."""
    while True:
        phases: list[list[int]] = [[] for _ in ends]
        at = len(ends) - 1
        last_reader = max((i for i in backward if min(graph.reads[i], default=i) < graph.turn), default=-1)
        for index in backward:
            low, high = _labels(graph, ends, index, at)
            if index > last_reader:
                high = 0  # no forward value need be kept for it
            if low > high:  # it reads several blocks, or one whose phase is over: join them
                del ends[high:low]
                break
            at = high
            phases[at].append(index)
        else:
            return phases


def _labels(graph: Graph, ends: Sequence[int], index: int, at: int) -> tuple[int, int]:
    """Return the first and the last block, up to `at`, whose phase can contain the node."""
    low, high = 0, at
    for source in graph.reads[index]:
        if source < graph.turn:
            k = bisect_left(ends, source)
            low, high = max(low, k), min(high, k + (ends[k] == source))
    return low, high


def _block(graph: Graph, ends: Sequence[int], k: int, phase: Sequence[int], begins: int) -> Block:
    start, end = (ends[k - 1] if k else -1), ends[k]
    inside = [i for i in graph.operators if start < i <= end]
    read = {source for index in phase for source in graph.reads[index]}
    saved = tuple(i for i in inside if i in read)
    advance = _needed(graph, inside, [end])
    reverse = _needed(graph, inside, saved)
    keep = {end, *saved}
    gradients = _alive_backward(graph, begins)
    return Block(
        everything=tuple(inside),
        advance=advance,
        reverse=reverse,
        phase=tuple(phase),
        saved=saved,
        end=end,
        end_size=graph.nodes[end].size,
        saved_size=_bytes(graph, keep),
        advance_cost=_cost(graph, advance),
        all_cost=_cost(graph, _needed(graph, inside, keep)),
        reverse_cost=_cost(graph, reverse),
        phase_cost=_cost(graph, phase),
        all_peak=_peak(graph, inside, set(), keep),
        advance_peak=_peak(graph, inside, set(), {end}),
        reverse_peak=_peak(graph, reverse, set(), set(saved)),
        phase_peak=gradients + _peak(graph, phase, set(saved), set()) if phase else 0,
        gradients=gradients,
    )


def emit(chain: Sequence[Block], choose: Callable[[int, int, int], Choice], state: int) -> list[int]:
    """Return the nodes computed, in order, if blocks s to t are reversed as `choose(s, t, state)` says.

    Each choice says how far to run before the next checkpoint, and which state to pass to each of the two
    parts. `choose` is called for the whole chain with `state` first, and only for s < t.
    """
    computes: list[int] = []
    visited = -1
    last = len(chain) - 1
    stack: list[tuple[int, int, int]] = [(0, last, state)]
    while stack:
        s, t, state = stack.pop()
        if t < 0:
            computes.extend(chain[s].phase)
            continue
        if s == t:
            computes.extend(chain[s].everything if s == last else chain[s].reverse)
            computes.extend(chain[s].phase)
            continue
        k, right, left = choose(s, t, state)
        if k is None:  # keep all that block s saves until its phase
            computes.extend(chain[s].everything)
            visited = max(visited, s)
            stack += [(s, -1, 0), (s + 1, t, right)]
            continue
        for block in range(s, k + 1):
            computes.extend(chain[block].advance if block <= visited else chain[block].everything)
        visited = max(visited, k)
        stack += [(s, k, left), (k + 1, t, right)]
    return computes


def _needed(graph: Graph, inside: Sequence[int], wanted: Iterable[int]) -> tuple[int, ...]:
    found = set(wanted)
    for index in reversed(inside):
        if index in found:
            found.update(graph.reads[index])
    return tuple(i for i in inside if i in found)


def _cost(graph: Graph, nodes: Iterable[int]) -> int:
    return sum(graph.nodes[i].cost for i in nodes)


def _bytes(graph: Graph, nodes: Iterable[int]) -> int:
    return sum(graph.nodes[i].size for i in nodes)


def _alive_backward(graph: Graph, start: int) -> int:
    """Return the bytes of backward values made before `start` that are read at `start` or later, or are
    outputs."""
    return sum(
        graph.nodes[i].size
        for i in range(graph.turn, start)
        if not graph.nodes[i].constant
        and (graph.nodes[i].output or (graph.users[i] and graph.users[i][-1] >= start))
    )


def _peak(graph: Graph, nodes: Sequence[int], before: set[int], keep: set[int]) -> int:
    """Return the peak bytes while `nodes` run, without values kept elsewhere.

    `before` is resident at first, and `keep` stays. A backward value lives until its last reader, an output
    to the end. What a phase frees of earlier phases' gradients is subtracted, so `used` may be negative.
    """
    here = set(nodes) | before
    remaining = {i: len([user for user in graph.users[i] if user in here]) for i in here}
    used = _bytes(graph, before)
    peak = used
    for index in nodes:
        node = graph.nodes[index]
        peak = max(peak, used + node.size + node.workspace)
        used += node.size
        for source in (*graph.reads[index], index):
            if source in here:
                if source != index:
                    remaining[source] -= 1
                done = remaining[source] == 0 and source not in keep and not graph.nodes[source].output
                if done and (source < graph.turn or not _later(graph, source, index)):
                    used -= graph.nodes[source].size
            elif source >= graph.turn and not graph.nodes[source].output and graph.users[source][-1] == index:
                used -= graph.nodes[source].size
    return peak


def _later(graph: Graph, source: int, index: int) -> bool:
    return bool(graph.users[source]) and graph.users[source][-1] > index
