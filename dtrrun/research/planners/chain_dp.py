"""The optimal persistent plan of a heterogeneous chain, by dynamic programming over discretized memory.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains (2019),
known as Rotor. For s ≤ t and m bytes, C(s, t, m) is the least cost of reversing blocks s to t when c_{s-1}
is held and m bytes are left for everything else:

    C(s, s, m) = recompute what the phase of s needs, and run it
    C(s, t, m) = min of  Σ advance(s … k) + C(k+1, t, m - |c_k|) + C(s, k, m)      for s ≤ k < t
                 and     all(s) + C(s+1, t, m - |c_s and saved(s)|) + phase(s)

provided that the peaks in between fit into m.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from .blocks import Block, Choice, blocks, emit
from .extra import numpy
from .graph import Graph
from .plan import Infeasible, Plan, run, with_frees

SLOTS = 500
CELLS = 12_000_000
"""Maximum number of entries of C; with many blocks, memory is cut into fewer slots."""


def chain_dp(graph: Graph, budget_bytes: int, slots: int = SLOTS) -> Plan:
    """Return the cheapest persistent plan: a checkpoint, once taken, is kept until the phase that reads it.

    Memory is counted in units: the greatest common divisor of the sizes if the budget is at most `slots` of
    those, else a slot's bytes, with sizes rounded up. Only in the first case is the claim "optimal", among
    persistent plans of the chain of blocks. On uniform chains no other plan is better (Griewank and Walther
    2000). Raises Infeasible, NotApplicable without a backward pass, and MissingExtra without numpy.
    """
    chain = blocks(graph)
    forward_outputs = sum(node.size for node in graph.nodes[: graph.turn] if node.output)
    available = budget_bytes - graph.constant_bytes - forward_outputs
    if available < 0:
        raise Infeasible(f"the constants alone take more than {budget_bytes} bytes")
    slots = max(8, min(slots, CELLS // len(chain) ** 2))
    sizes = [node.size for node in graph.nodes if not node.constant]
    unit = gcd(*sizes, *(node.workspace for node in graph.nodes)) or 1
    exact = available // unit <= slots and not forward_outputs
    if available // unit > slots:
        unit = -(-available // slots)
    table = _Table(chain, unit, available // unit)
    if table.cost[0, -1, -1] == float("inf"):
        raise Infeasible(f"no persistent plan of the chain fits into {budget_bytes} bytes")
    steps = with_frees(graph, emit(chain, table.choose, available // unit))
    among = "persistent plans of the chain"
    if not exact:
        return Plan(steps, "chain_dp", "feasible", among)
    return Plan(steps, "chain_dp", "optimal", among, float(run(graph, steps).cost))


class _Table:
    """C(s, t, m) for m from 0 to `top` units. A class, since the choices are later read from it."""

    def __init__(self, chain: Sequence[Block], unit: int, top: int) -> None:
        np = self.np = numpy()
        self.chain, self.unit, self.top = chain, unit, top
        n = len(chain)
        self.cost = np.full((n, n, top + 1), np.inf)
        self.after = np.full((n, n, top + 1), np.inf)
        """[t, k, m]: C(k, t, m - |c_{k-1}|), so that all k for one t are contiguous."""
        for length in range(n):
            for s in range(n - length):
                self._fill(s, s + length)

    def units(self, size: int) -> int:
        return -(-size // self.unit)

    def _fill(self, s: int, t: int) -> None:
        np, chain = self.np, self.chain
        if s == t:
            block, last = chain[s], s == len(chain) - 1
            peak = block.all_peak if last else block.gradients + block.reverse_peak
            need = self.units(max(peak, block.phase_peak))
            cost = (block.all_cost if last else block.reverse_cost) + block.phase_cost
            self.cost[s, s, need:] = cost
        else:
            self.cost[s, t] = np.minimum(self._checkpoints(s, t).min(axis=0), self._all(s, t))
        if s:
            held = self.units(chain[s - 1].end_size)
            self.after[t, s, held:] = self.cost[s, t, : max(0, self.top + 1 - held)]

    def _checkpoints(self, s: int, t: int) -> Any:
        """[k - s, m]: the cost with the next checkpoint at c_k, s ≤ k < t."""
        np, chain = self.np, self.chain
        costs, needs = [], []
        cost = peak = 0
        for j in range(s, t):
            cost += chain[j].advance_cost
            peak = max(peak, chain[j].advance_peak + (chain[j - 1].end_size if j > s else 0))
            costs.append(cost)
            needs.append(self.units(peak + chain[t].gradients))
        total = self.after[t, s + 1 : t + 1] + self.cost[s, s:t] + np.array(costs, float)[:, None]
        total[np.arange(self.top + 1)[None, :] < np.array(needs)[:, None]] = np.inf
        return total

    def _all(self, s: int, t: int) -> Any:
        block = self.chain[s]
        held = self.units(block.saved_size)
        need = self.units(max(block.phase_peak, block.all_peak + self.chain[t].gradients))
        row = self.np.full(self.top + 1, self.np.inf)
        row[held:] = self.cost[s + 1, t, : max(0, self.top + 1 - held)] + block.all_cost + block.phase_cost
        row[:need] = self.np.inf
        return row

    def choose(self, s: int, t: int, m: int) -> Choice:
        options = self._checkpoints(s, t)[:, m]
        block = self.chain[s]
        if self._all(s, t)[m] <= options.min():
            return Choice(None, m - self.units(block.saved_size), 0)
        k = s + int(options.argmin())
        return Choice(k, m - self.units(self.chain[k].end_size), m)
