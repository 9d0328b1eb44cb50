"""Theorem 2: what the adversary forces engines to do, and the optimum on the same networks."""

from __future__ import annotations

import pytest
from tiny_engine import TinyEngine, evicted_neighbourhood

from dtrrun.research.planners import run
from dtrrun.research.theory import adversary, revealed, static_plan
from dtrrun.research.theory.adversary import least_cost

SCORES = {
    "lru": None,
    "e_star": evicted_neighbourhood,
    "oldest": lambda engine, tensor: tensor,
    "newest": lambda engine, tensor: -tensor,
}


@pytest.mark.parametrize("budget", [3, 5])
@pytest.mark.parametrize("name", SCORES)
def test_every_engine_pays_for_whole_paths(name: str, budget: int) -> None:
    nodes = 60
    engine = TinyEngine(budget, SCORES[name])
    network = adversary(engine, nodes, budget)
    assert engine.peak <= budget
    assert network.missed == 0
    assert len(network.paths) == budget
    assert sum(map(len, network.paths)) == nodes - 1
    lengths = [len(path) for path in network.paths]
    assert engine.cost == sum(length * (length + 1) // 2 for length in lengths)
    assert engine.cost >= least_cost(budget, nodes) >= (nodes - 1) ** 2 / (2 * budget)


def test_the_optimum_computes_each_node_once_in_three_units() -> None:
    network = adversary(TinyEngine(4), 50, 4)
    graph, best = revealed(network), static_plan(network)
    assert run(graph, best) == (49, 3)
    assert (best.claim, best.lower_bound) == ("optimal", 49)
    assert len(graph) == 50


def test_the_ratio_grows_with_n_over_b() -> None:
    def ratio(nodes: int, budget: int) -> float:
        engine = TinyEngine(budget)
        network = adversary(engine, nodes, budget)
        return engine.cost / run(revealed(network), static_plan(network)).cost

    for nodes, budget in ((40, 4), (80, 4), (160, 4), (80, 8), (160, 8)):
        assert ratio(nodes, budget) >= nodes / budget / 2


def test_an_engine_with_more_memory_than_it_says_is_found_out() -> None:
    assert adversary(TinyEngine(40), 30, 4).missed == 30 - 1 - 4


def test_the_revealed_graph_is_the_network() -> None:
    engine = TinyEngine(3)
    network = adversary(engine, 20, 3)
    handles = {handle for path in network.paths for handle in path}
    assert handles == set(range(1, 20))
    assert [node.inputs for node in revealed(network).nodes] == engine.inputs


def test_too_little_to_build_on() -> None:
    with pytest.raises(ValueError, match="at least 3 tensors"):
        adversary(TinyEngine(2), 10, 2)
    with pytest.raises(ValueError, match="6 nodes, not 5"):
        adversary(TinyEngine(5), 5, 5)
