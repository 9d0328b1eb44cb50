"""dtrrun.simulator.sweep and simulate"""

import dataclasses
import gzip
import multiprocessing
from operator import itemgetter
from pathlib import Path

import pytest

from dtrrun.simulator import sweep
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import Call, Constant, LogError
from dtrrun.simulator.replay import Replay, simulate
from dtrrun.simulator.schedule import schedule_of
from tests.log_files import write_log
from tests.unit.simulator_logs import random_log
from tests.waiting import until

SEED = 7
LOGS = Path(__file__).parents[1] / "logs"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "random.log"
    write_log(random_log(SEED), path)
    return str(path)


def wanted(log, **options):
    facts = sweep.read_facts([log])
    budgets = [sweep.Budget(ratio=share) for share in (1.0, 0.5, 0.1)] + [sweep.Budget(nbytes=400)]
    return facts, sweep.cells(facts, ["lru", "h_dtr_eq"], budgets, ("eager", "ignore"), **options)


def swept(cells, jobs=1):
    return [row for _, row in sorted(sweep.run_all(sweep.run_cell, cells, jobs), key=itemgetter(0))]


def alike(rows):
    return [dataclasses.replace(row, seconds=0) for row in rows]


def test_every_combination_has_its_row_in_order(log):
    (facts,), cells = wanted(log, limit=8)
    rows = swept(cells)
    assert len(rows) == 2 * 2 * 4
    for cell, row in zip(cells, rows, strict=True):
        outcome = simulate(
            schedule_of(random_log(SEED), "random"),
            row.budget_bytes,
            cell.heuristic,
            deallocation=cell.deallocation,
            limit=8,
        )
        assert (row.log, row.heuristic, row.deallocation) == ("random", cell.heuristic, cell.deallocation)
        assert (row.status, row.evictions, row.rematerializations, row.evaluations, row.peak_bytes) == (
            outcome.status,
            outcome.evictions,
            outcome.rematerializations,
            outcome.evaluations,
            outcome.peak_bytes,
        )
        assert row.overhead == (outcome.overhead if row.status == "ok" else None)
        assert row.peak_bytes <= row.budget_bytes
    first = rows[:4]
    assert [row.budget_ratio for row in first] == [1.0, 0.5, 0.1, 400 / facts.peak_bytes]
    assert [row.budget_bytes for row in first[:2]] == [facts.peak_bytes, facts.peak_bytes // 2]
    assert {row.status for row in rows} >= {"ok", "oom"}


def test_a_budget_that_does_not_do_ends_nothing(log):
    facts = sweep.read_facts([log])
    rows = swept(sweep.cells(facts, ["lru"], [sweep.Budget(nbytes=1), sweep.Budget(ratio=1.0)]))
    assert [row.status for row in rows] == ["oom", "ok"]


def test_processes_give_the_same_rows(log):
    _, cells = wanted(log)
    assert alike(swept(cells, jobs=2)) == alike(swept(cells))


def test_who_stops_leaves_no_process_behind(log):
    _, cells = wanted(log)
    rows = sweep.run_all(sweep.run_cell, cells, 2)
    next(rows)
    rows.close()
    # The pool's own thread may be the first to learn of the end.
    until(lambda: not multiprocessing.active_children())


def test_facts_are_the_schedules(log):
    schedule = schedule_of(random_log(SEED), "random")
    (facts,) = sweep.read_facts([log])
    assert (facts.log, facts.path, facts.peak_bytes) == ("random", log, schedule.peak_bytes)
    assert facts.constant_bytes == schedule.constant_bytes > 0
    assert facts.largest_bytes == schedule.largest_bytes > 0
    assert facts.plain_seconds * 1e9 == pytest.approx(schedule.cost)


def test_logs_of_one_name_go_by_their_paths(log, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "random.log"
    other.write_text(Path(log).read_text())
    assert [one.log for one in sweep.read_facts([log, str(other)])] == [log, str(other)]
    assert sweep.log_name("a/b.log.gz") == "b"


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        sweep.read_facts([str(tmp_path / "nowhere.log")])
    (tmp_path / "bad.log").write_bytes(gzip.compress(b"x"))
    with pytest.raises(LogError, match=r"bad\.log"):
        sweep.read_facts([str(tmp_path / "bad.log")])


def test_names_are_checked():
    schedule = schedule_of(random_log(SEED), "random")
    with pytest.raises(ValueError, match="'soon' is not one of eager"):
        simulate(schedule, None, deallocation="soon")
    with pytest.raises(ValueError, match="unknown heuristic"):
        simulate(schedule, None, "h")


@pytest.mark.parametrize("heuristic", ["lru", "h_dtr"])
def test_the_scan_gives_the_same_run(heuristic):
    schedule = schedule_of(random_log(SEED, 200), "random")
    for ties in (True, False):
        fast, slow = (
            simulate(schedule, schedule.peak_bytes // 2, heuristic, limit=50, paper_ties=ties, scan=scan)
            for scan in (False, True)
        )
        assert (fast.status, fast.time, fast.evictions) == (slow.status, slow.time, slow.evictions)
        assert fast.evaluations < slow.evaluations


@pytest.mark.parametrize(("ties", "first"), [(True, 1), (False, 0)])
def test_which_of_equal_scores_goes_first(ties, first):
    schedule = schedule_of(
        [Constant("w", 1), *(Call("op", ("w",), (name,), (4,), (-1,), 1) for name in "abc")], "ties"
    )
    gone = []
    replay = Replay(
        schedule,
        9,
        "size",
        paper_ties=ties,
        observer=lambda *event: event[0] == "evict" and gone.append(event[1]),
    )
    assert replay.run().status == "oom"  # all of them are outputs
    assert gone[0] == 1 + first


def test_our_own_semantics_are_those_of_the_prediction():
    log = str(LOGS / "vae.log.gz")
    peak = predict(log, None).peak_bytes
    cell = sweep.Cell(log, "vae", "h_dtr", sweep.Budget(ratio=0.5), semantics="dtrrun")
    row = sweep.run_cell(cell)
    told = predict(log, peak // 2, "h_dtr")
    assert (row.budget_bytes, row.evictions, row.overhead) == (peak // 2, told.evictions, told.overhead)
    assert (row.semantics, row.status, row.settings) == ("dtrrun", "ok", "h_dtr")
    sweep.steps_at.cache_clear()
    best = sweep.run_cell(dataclasses.replace(cell, heuristic="portfolio"))
    steps = sweep.steps_at.cache_info()
    assert steps.misses == 1 < steps.hits  # the step is watched once, not in each replay
    assert best.overhead < row.overhead
    assert best.overhead == predict(log, peak // 2, best.settings).overhead
    with pytest.raises(ValueError, match="eager"):
        sweep.run_cell(dataclasses.replace(cell, deallocation="banish"))
