"""dtrrun.research.planned"""

import math

import pytest

from dtrrun.research.planned import NAMES, PlanCell, graph_of, plan_cells, run_planner
from dtrrun.simulator import sweep
from dtrrun.simulator.log import Annotate, Call, Constant, Release
from dtrrun.simulator.replay import simulate
from dtrrun.simulator.schedule import schedule_of
from tests.log_files import write_log
from tests.unit.simulator_logs import random_log

planners = pytest.importorskip("dtrrun.research.planners")
pytest.importorskip("scipy")

LAYERS = 6


def training():
    """A chain and its backward pass, with a view of each activation."""
    log = [Constant("w", 5), Call("op", ("w",), ("x0",), (10,), (-1,), 3)]
    for i in range(1, LAYERS + 1):
        log.append(Call("view", (f"x{i - 1}",), (f"v{i}",), (0,), (0,), 1))
        log.append(Call("op", (f"v{i}", "w"), (f"x{i}",), (10,), (-1,), 3))
    log += [Annotate("BACKWARD"), Call("loss", (f"x{LAYERS}",), (f"g{LAYERS}",), (10,), (-1,), 1)]
    for i in range(LAYERS, 0, -1):
        log.append(Call("back", (f"g{i}", f"v{i}", f"x{i}"), (f"g{i - 1}",), (10,), (-1,), 4))
        log += [Release(f"g{i}"), Release(f"x{i}"), Release(f"v{i}")]
    return [*log, Release("x0")]


def test_the_graph_is_the_log():
    schedule = schedule_of(training(), "chain")
    graph = graph_of(schedule)
    assert graph.total_cost == schedule.cost
    assert graph.constant_bytes == schedule.constant_bytes == 5
    assert planners.run(graph, planners.in_order(graph)) == (schedule.cost, schedule.peak_bytes)
    assert [node.output for node in graph.nodes].count(True) == 1
    assert len(graph.operators) == 1 + LAYERS + 1 + LAYERS
    assert graph.turn == 1 + 1 + LAYERS  # the constant, and the forward pass
    reads = [[graph.nodes[i].size for i in node.inputs] for node in graph.nodes]
    assert reads[2] == [5, 10]  # the constant, and the storage that the view shares


@pytest.mark.parametrize("seed", range(5))
def test_any_log_has_a_graph(seed):
    schedule = schedule_of(random_log(seed), "random")
    graph = graph_of(schedule)
    assert graph.total_cost <= schedule.cost
    # A planner's constants stay even after the program has released them.
    peak = planners.run(graph, planners.in_order(graph)).peak_bytes
    assert peak <= schedule.peak_bytes + schedule.constant_bytes


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("logs") / "chain.log"
    write_log(training(), path)
    return str(path)


def test_rows(log):
    facts = sweep.read_facts([log])
    budgets = [sweep.Budget(ratio=1.0), sweep.Budget(ratio=0.75), sweep.Budget(nbytes=8)]
    cells = plan_cells(facts, NAMES, budgets, 10)
    rows = [run_planner(cell) for cell in cells]
    found = {(row.planner, row.budget_bytes): row for row in rows}
    assert len(found) == 3 * len(NAMES)
    peak = facts[0].peak_bytes
    for name in NAMES:
        assert found[name, 8].status == "oom"
        assert found[name, 8].overhead is None
    assert found["checkmate", peak].overhead == found["lower_bound", peak].overhead == 1.0
    tight = {name: found[name, int(peak * 0.75)] for name in NAMES}
    best = tight["checkmate"]
    assert best.claim.startswith("optimal among")
    assert tight["lower_bound"].claim.startswith("lower bound")
    assert 1 < best.overhead < 2
    assert tight["lower_bound"].overhead <= best.overhead
    for name in ("chen_sqrt", "chen_greedy", "treeverse", "chain_dp"):
        if tight[name].status == "ok":
            assert tight[name].overhead >= best.overhead
    assert any(tight[name].status == "ok" for name in ("chen_greedy", "chain_dp"))


def test_no_run_is_below_the_bound(log):
    schedule = sweep.schedule_at(log)
    for ratio in (0.9, 0.75, 0.6):
        bound = run_planner(PlanCell(log, "chain", "lower_bound", sweep.Budget(ratio=ratio)))
        found = simulate(schedule, int(schedule.peak_bytes * ratio), "h_dtr", limit=math.inf)
        if found.status == "ok":
            assert bound.overhead <= found.overhead


def test_long_logs_are_grouped(log, monkeypatch):
    import dtrrun.research.planned as module

    monkeypatch.setattr(module, "NODES", 8)
    row = run_planner(PlanCell(log, "chain", "checkmate", sweep.Budget(ratio=0.9), seconds=10))
    assert row.status == "ok"
    assert row.claim.startswith("feasible (")
    assert row.bound is None  # it holds for the groups only, not for the log's plans
    assert row.nodes <= 8
