"""Checkmate's plans as a mixed-integer program: R and S over the stages of the program.

Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez: Checkmate (2020). Stage t begins with what
S_t holds, recomputes what R_t says, in the program's order and each node at most once, and ends with the
first computation of operator t ("frontier-advancing"); one more stage recomputes outputs. What is resident
while k is computed in stage t is described not by their variables FREE, which count hazards, but by

    P_{t,i} at k  ≥ R_{t,j} for each user j of i from k to t,  and  ≥ S_{t+1,i}

which is whole where R and S are, and makes a tighter relaxation: i is needed when k runs if it is read later
in the stage, or the next stage begins with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .graph import Graph
from .program import Program, Terms


@dataclass(frozen=True)
class Stages:
    program: Program
    recompute: list[list[int]]
    """[t][i]: the variable R_{t,i}. In the last stage nothing is computed for the first time."""
    hold: list[list[int]]
    """[t][i]: the variable S_{t,i}; the last row is what the program ends with."""
    total: float
    """Costs are expressed as fractions of this."""


def formulate(graph: Graph, budget_bytes: int) -> Stages:
    """Return the program for graph and budget; operators are numbered without constants."""
    program = Program()
    operators = graph.operators
    nodes = [graph.nodes[i] for i in operators]
    number = {index: k for k, index in enumerate(operators)}
    reads = [[number[s] for s in graph.reads[i]] for i in operators]
    users = [[number[u] for u in graph.users[i]] for i in operators]
    partners = [None if node.partner is None else number[node.partner] for node in nodes]
    n = len(nodes)
    total = float(graph.total_cost or 1)
    room = float(budget_bytes - graph.constant_bytes)
    size = [node.size / max(room, 1.0) for node in nodes]
    room /= max(room, 1.0)

    stages = len(graph.runs)
    known = [0, *(number[made[-1]] + 1 for made in graph.runs), n]
    """Nodes below known[t] have been computed before stage t."""

    def recompute(t: int, i: int) -> int:
        return program.variable(nodes[i].cost / total, float(i >= known[t]), whole=i < known[t])

    def hold(t: int, i: int) -> int:
        needed = t == stages + 1 and nodes[i].output
        return program.variable(0.0, float(needed), whole=True)

    r = [[recompute(t, i) for i in range(known[t + 1])] for t in range(stages + 1)]
    s = [[hold(t, i) for i in range(known[t])] for t in range(stages + 2)]
    for t in range(stages + 1):
        present = [_presence(program, users[i], r[t], s[t + 1][i]) for i in range(known[t + 1])]
        for k in range(known[t + 1]):
            for j in reads[k]:
                program.at_least({r[t][j]: 1, **_term(s[t], j)}, {r[t][k]: 1})
            program.at_least({r[t][k]: 1, **_term(s[t], k)}, {s[t + 1][k]: 1})
            first = partners[k]
            if first is not None:  # its operator runs in the same stage, and so right before it
                program.at_least({r[t][first]: 1}, {r[t][k]: 1})
            if k < known[t] and k not in partners:
                program.row({r[t][k]: 1, s[t][k]: 1}, high=1.0)
        # U_{t,k}: what is resident while k is computed, k included, each as a difference from the last one
        before = -1
        for k in range(known[t + 1]):
            now = program.variable(0.0, 0.0, max(0.0, room))
            terms: dict[int, float] = {now: 1.0}
            if k == 0:
                for i in range(len(s[t])):
                    _add(terms, s[t][i], -size[i])
            else:
                _add(terms, before, -1.0)
                _add(terms, r[t][k - 1], size[k - 1])
                for column in _term(s[t], k - 1):
                    _add(terms, column, size[k - 1])
                _add(terms, present[k - 1][0][1], -size[k - 1])
                for i in reads[k - 1]:
                    _add(terms, _at(present[i], k - 1), size[i])
                    _add(terms, _at(present[i], k), -size[i])
            _add(terms, r[t][k], -size[k])
            program.row(terms, 0.0, 0.0)
            if nodes[k].workspace:
                workspace = nodes[k].workspace / max(float(budget_bytes - graph.constant_bytes), 1.0)
                program.row({now: 1.0, r[t][k]: workspace}, high=room)
            before = now
    return Stages(program, r, s, total)


def _presence(program: Program, users: list[int], r: list[int], held: int) -> list[tuple[int, int]]:
    """Return pairs (k, variable): whether the node is resident after the previous pair's k, up to this k."""
    found = [(len(r), held)]
    for user in reversed([user for user in users if user < len(r)]):
        variable = program.variable()
        program.at_least({variable: 1}, {found[-1][1]: 1})
        program.at_least({variable: 1}, {r[user]: 1})
        found.append((user, variable))
    return found[::-1]


def _at(present: list[tuple[int, int]], k: int) -> int:
    return next(variable for last, variable in present if k <= last)


def _term(row: list[int], i: int) -> Terms:
    return {row[i]: 1} if i < len(row) else {}


def _add(terms: dict[int, float], column: int, value: float) -> None:
    terms[column] = terms.get(column, 0.0) + value


def computes(graph: Graph, stages: Stages, values: Any) -> list[int]:
    """Return what an integer solution computes, in order."""
    operators = graph.operators
    return [
        operators[i] for row in stages.recompute for i, variable in enumerate(row) if values[variable] > 0.5
    ]
