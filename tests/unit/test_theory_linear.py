"""Theorem 1's network, run by a small engine with h_{e*}."""

from __future__ import annotations

import math

import pytest
from tiny_engine import TinyEngine, evicted_neighbourhood

from dtrrun.research.planners import chain, in_order, run
from dtrrun.research.theory import linear


@pytest.mark.parametrize("layers", [1, 2, 3, 10])
def test_the_stream_is_the_chain(layers: int) -> None:
    engine = TinyEngine(1000)
    last = linear(engine, layers)
    graph = chain(layers)
    assert [tuple(sorted(inputs)) for inputs in engine.inputs] == [node.inputs for node in graph.nodes]
    assert last == len(graph) - 1
    assert engine.cost == graph.total_cost
    assert engine.peak == run(graph, in_order(graph)).peak_bytes
    assert engine.memory == {last}


def test_what_is_watched() -> None:
    seen: list[str] = []
    linear(
        TinyEngine(9), 3, lambda f, b: seen.append("".join("x" if v is not None else "." for v in [*f, *b]))
    )
    assert seen == ["x.....", "xx....", "xx....", "x....x", "....x.", "...x.."]


@pytest.mark.parametrize("layers", [25, 64, 100])
def test_theorem_1(layers: int) -> None:
    """O(N) operations in 2⌈√N⌉ memory: with the constant of App. A's figure, under 3 times the least."""
    budget = 2 * math.ceil(math.sqrt(layers))
    engine = TinyEngine(budget, evicted_neighbourhood)
    linear(engine, layers)
    assert engine.peak <= budget
    assert 2 * layers < engine.cost <= 3 * 2 * layers


def test_no_layers() -> None:
    with pytest.raises(ValueError, match="at least one"):
        linear(TinyEngine(3), 0)
