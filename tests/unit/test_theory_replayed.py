"""The replay as the theorems' engine; theorems 1 and 2 with the real heuristics."""

from __future__ import annotations

import pytest

from dtrrun.research.planners import Infeasible, chain, chain_dp, checkmate, run
from dtrrun.research.theory import (
    Recorded,
    Replayed,
    TheoryCell,
    adversary,
    binomial_optimum,
    linear,
    linear_schedule,
    run_theory,
    theory_cells,
)
from dtrrun.research.theory.adversary import least_cost
from dtrrun.research.theory.measure import root_budget
from dtrrun.simulator.log import read_log
from dtrrun.simulator.replay import Stopped, simulate
from dtrrun.simulator.schedule import schedule_of
from tests.log_files import write_log

HEURISTICS = ("e_star", "h_dtr", "h_dtr_eq", "h_dtr_local", "h_chain", "h_next", "lru", "size")


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("layers", [1, 2, 9, 40])
def test_a_chain_as_a_log_gives_the_same(heuristic: str, layers: int) -> None:
    budget = max(3, root_budget(layers) - 2)
    schedule = linear_schedule(layers)
    outcome = simulate(schedule, budget, heuristic, deallocation="banish", limit=float("inf"))
    engine = Replayed(budget, heuristic, previous=schedule)
    linear(engine, layers)
    assert outcome.status == "ok"
    assert engine.operations == outcome.time
    assert engine.core.peak_bytes == outcome.peak_bytes <= budget
    assert engine.core.rematerializations == outcome.rematerializations


def test_the_log_is_a_log(tmp_path) -> None:
    recorded = Recorded()
    linear(recorded, 7)
    path = tmp_path / "linear.log"
    write_log(recorded.log, path)
    read, known = schedule_of(read_log(path), "linear 7"), linear_schedule(7)
    assert (read.operators, read.events, read.outputs) == (known.operators, known.events, known.outputs)
    assert read.cost == 14


@pytest.mark.parametrize("layers", [1, 2, 16, 64, 256, 1024])
@pytest.mark.parametrize("heuristic", ["e_star", "h_dtr_eq", "h_chain"])
def test_theorem_1(heuristic: str, layers: int) -> None:
    row = run_theory(TheoryCell("linear", heuristic, layers, max(3, root_budget(layers))))
    assert row.status == "ok"
    assert row.operations is not None
    assert row.optimum <= row.operations <= 4 * layers
    assert row.per_node == row.operations / layers


def test_a_heuristic_that_looks_at_no_neighbourhood_is_not_linear() -> None:
    small, large = (run_theory(TheoryCell("linear", "lru", n, root_budget(n))) for n in (64, 256))
    assert small.per_node
    assert large.per_node
    assert large.per_node > 2 * small.per_node


@pytest.mark.parametrize("heuristic", ["e_star", "lru", "random"])
def test_theorem_2(heuristic: str) -> None:
    for nodes, budget in ((40, 4), (160, 4), (80, 8), (320, 8)):
        engine = Replayed(budget, heuristic)
        network = adversary(engine, nodes, budget)
        assert network.missed == 0
        assert engine.core.peak_bytes <= budget
        assert engine.operations >= least_cost(budget, nodes)
        row = run_theory(TheoryCell("adversary", heuristic, nodes, budget))
        assert row.operations == engine.operations
        assert row.ratio
        assert row.ratio >= nodes / budget / 2


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8, 13, 21])
def test_the_binomial_optimum_is_that_of_dynamic_programming(layers: int) -> None:
    for budget in range(3, layers + 3):
        graph = chain(layers)
        assert binomial_optimum(layers, budget) == run(graph, chain_dp(graph, budget)).cost


def test_the_binomial_optimum_is_that_of_all_plans_in_stages() -> None:
    graph = chain(7)
    found = checkmate(graph, 3)
    assert found.claim == "optimal"
    assert run(graph, found).cost == binomial_optimum(7, 3)


def test_no_network_runs_in_less_than_three() -> None:
    with pytest.raises(Infeasible):
        chain_dp(chain(5), 2)
    for theory in ("linear", "adversary"):
        with pytest.raises(ValueError, match=r"the least is 3|at least 3 tensors"):
            run_theory(TheoryCell(theory, "e_star", 5, 2))
    with pytest.raises(ValueError, match="the least is 3"):
        binomial_optimum(5, 2)


def test_more_operations_than_allowed() -> None:
    engine = Replayed(16, "size", most=200)
    with pytest.raises(Stopped, match="thrash"):
        linear(engine, 64)
    assert 200 < engine.operations < 300
    row = run_theory(TheoryCell("linear", "size", 64, 16, limit=1.5))
    assert (row.status, row.operations, row.per_node, row.ratio) == ("thrash", None, None, None)
    assert row.optimum == 176


def test_nothing_left_to_evict() -> None:
    engine = Replayed(2)
    with pytest.raises(Stopped, match="oom"):
        linear(engine, 5)


def test_cells() -> None:
    cells = theory_cells("linear", ["lru", "e_star"], [64, 100], [])
    assert [(cell.nodes, cell.budget, cell.heuristic) for cell in cells] == [
        (64, 16, "lru"),
        (64, 16, "e_star"),
        (100, 20, "lru"),
        (100, 20, "e_star"),
    ]
    assert [cell.budget for cell in theory_cells("adversary", ["lru"], [20], [4, 20, 19])] == [4, 19]
    with pytest.raises(ValueError, match="less than N"):
        theory_cells("adversary", ["lru"], [20], [20])
