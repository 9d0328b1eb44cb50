"""`views.figures`: sums, the breakdown, the slowdown."""

import pytest
from fake_records import snapshot
from hypothesis import given
from hypothesis import strategies as st

from dtrrun.telemetry.fields import PARTS
from dtrrun.telemetry.times import breakdown
from dtrrun.views.figures import merged, operators, slowdown, total


def test_total_adds_but_for_peak_and_steps() -> None:
    two = [snapshot(1, evictions=3, peak_bytes=10, steps=5), snapshot(2, evictions=4, peak_bytes=30, steps=4)]
    counters = total(two)
    assert (counters["evictions"], counters["peak_bytes"], counters["steps"]) == (7, 30, 5)
    assert total([]) == {}


@given(st.fixed_dictionaries({f"{name}_ns": st.integers(0, 10**15) for name in ("wall", *PARTS)}))
def test_parts_add_up_to_wall(nanoseconds: dict[str, int]) -> None:
    seconds = breakdown(nanoseconds)
    assert sum(seconds.values()) - seconds["wall"] == pytest.approx(seconds["wall"])
    assert seconds["other"] >= 0


def test_slowdown() -> None:
    seconds = breakdown(
        {"wall_ns": 10e9, "operators_ns": 6e9, "rematerialization_ns": 2e9, "scoring_ns": 0.5e9}
    )
    assert slowdown(seconds) == pytest.approx(10 / 7.5)
    assert slowdown(breakdown({})) is None


def test_waiting_for_the_allocator_is_time_without_work_for_the_gpu() -> None:
    device = {"wall_ns": 10e9, "device_operators_ns": 6e9, "device_rematerialization_ns": 1e9}
    seconds = breakdown(device | {"allocator_ns": 2e9, "bookkeeping_ns": 4e9})
    assert (seconds["allocator"], seconds["bookkeeping"], seconds["other"]) == (2, 1, 0)
    assert slowdown(seconds) == pytest.approx(10 / 6)
    seconds = breakdown(device | {"allocator_ns": 4e9, "bookkeeping_ns": 4e9})
    assert (seconds["allocator"], seconds["bookkeeping"]) == (3, 0)


def test_waiting_for_the_allocator_is_a_part_of_operators_where_the_host_decides() -> None:
    host = {"wall_ns": 10e9, "device_operators_ns": 2e9, "operators_ns": 6e9, "bookkeeping_ns": 1e9}
    seconds = breakdown(host | {"allocator_ns": 2e9})
    assert (seconds["operators"], seconds["allocator"], seconds["other"]) == (4, 2, 3)
    assert slowdown(seconds) == pytest.approx(10 / 7)


def test_merged_adds_rows_of_one_name() -> None:
    rows = [{"name": "a", "n": 1, "s": 1.0}, {"name": "b", "n": 2, "s": 5.0}, {"name": "a", "n": 3, "s": 1.5}]
    assert merged(rows, "name", "s") == [{"name": "b", "n": 2, "s": 5.0}, {"name": "a", "n": 4, "s": 2.5}]


def test_operators_of_several_processes() -> None:
    one, two = operators([snapshot(1)]), operators([snapshot(1), snapshot(2)])
    assert [row["name"] for row in one] == [row["name"] for row in two]
    assert two[0]["seconds"] == 2 * one[0]["seconds"]


def test_tables_that_are_cut_or_absent_do_no_harm() -> None:
    assert operators([snapshot(tables={"operators": None}), snapshot(tables={"operators": ["cut", {}]})]) == [
        {"name": None}
    ]
