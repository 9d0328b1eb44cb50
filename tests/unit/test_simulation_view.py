"""dtrrun.views.simulation"""

import pytest

from dtrrun.views.simulation import count, print_simulation
from tests.unit.fake_records import printed
from tests.unit.view_snapshots import check


def row(heuristic, ratio, status="ok", overhead=1.0, **fields):
    overhead = overhead if status == "ok" else None
    return {
        "log": "lstm",
        "heuristic": heuristic,
        "deallocation": "eager",
        "search": "heap",
        "budget_ratio": ratio,
        "budget_bytes": int(1e9 * ratio),
        "status": status,
        "overhead": overhead,
        **fields,
    }


def result(rows, plans=()):
    log = {
        "log": "lstm",
        "operators": 7926,
        "plain_seconds": 0.769,
        "peak_bytes": 10**9,
        "constant_bytes": 2 * 10**8,
        "largest_bytes": 7 * 10**7,
    }
    return {"logs": [log], "rows": rows, "plans": list(plans)}


def show(rows, width=80, plans=()):
    return printed(print_simulation, result(rows, plans), width)


RATIOS = [tenths / 10 for tenths in range(10, 0, -1)]


def test_tables():
    rows = [row("h_dtr", ratio, overhead=2 - ratio) for ratio in RATIOS]
    rows += [row("h_dtr_eq", ratio, "ok" if ratio > 0.1 else "oom", overhead=2 - ratio) for ratio in RATIOS]
    rows += [
        row("lru", ratio, "ok" if ratio > 0.6 else "thrash", overhead=1 + (1 - ratio) ** 2)
        for ratio in RATIOS
    ]
    check("simulation_80", show(rows))


def test_deallocations_are_told_apart_and_what_was_not_done_is_empty():
    rows = [row("h_dtr", 1.0), row("h_dtr", 0.5, overhead=1.5), row("h_dtr", 1.0, deallocation="banish")]
    rows += [row("h_dtr", 0.123456, "oom", deallocation="ignore")]
    check("simulation_deallocation", show(rows))


def test_accesses_have_a_table_where_they_were_counted():
    rows = [
        row("h_dtr", 1.0, accesses=19_700_327),
        row("lru", 1.0, accesses=0),
        row("lru", 0.5, accesses=999),
    ]
    check("simulation_accesses", show(rows))


def plan(planner, ratio, claim, status="ok", overhead=1.25):
    fields = {"log": "lstm", "planner": planner, "budget_ratio": ratio, "budget_bytes": int(1e9 * ratio)}
    return {**fields, "claim": claim, "status": status, "overhead": overhead if status == "ok" else None}


def test_plans_say_what_they_are():
    plans = [plan("checkmate", 1.0, "optimal among plans in stages"), plan("checkmate", 0.5, "feasible")]
    plans += [plan("treeverse", 1.0, "no chain", "n/a"), plan("treeverse", 0.5, "does not fit", "oom")]
    plans += [plan("lower_bound", 1.0, "lower bound on plans in the program's order")]
    check("simulation_plans", show([row("lru", 1.0)], plans=plans))


@pytest.mark.parametrize("width", [40, 60, 70, 90])
def test_budgets_that_have_no_room_go_into_another_table(width):
    """The text and the figures do not change."""
    rows = [row("h_dtr_local", ratio, "thrash") for ratio in RATIOS] + [row("lru", 0.5, overhead=1.25)]
    text = show(rows, width)
    assert text.count("thrash") == len(RATIOS)
    assert text.count("%") == len(RATIOS)
    assert "1.25" in text
    assert "…" not in text
    assert text.count("overhead") == {40: 3, 60: 2, 70: 2, 90: 1}[width]
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (9540, "9.5k"),
        (9950, "10k"),
        (999_499, "999k"),
        (999_600, "1.0M"),
        (71_454_958, "71M"),
    ],
)
def test_count(number, text):
    assert count(number) == text
