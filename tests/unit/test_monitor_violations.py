"""dtrrun.monitor.violations"""

import pytest
from fake_records import snapshot

from dtrrun.monitor.violations import Tally, budget_of, exceeded
from dtrrun.telemetry.driver import DriverUse, Figure


def add(tally, nbytes, budget=100, source="nvml_pid"):
    return tally.add("GPU-a", Figure(nbytes, 1, source), budget)


def test_each_time_that_it_goes_over_counts():
    tally = Tally()
    assert [add(tally, size) for size in (90, 100, 101, 130, 100, 120, 90)] == [
        *(False, False, True, False),
        *(False, True, False),
    ]
    assert tally.use == DriverUse("GPU-a", 90, 130, "nvml_pid", violations=2, most_over_bytes=30)


def test_without_a_budget_there_is_nothing_to_exceed():
    tally = Tally()
    assert not add(tally, 10**12, None)
    assert tally.use == DriverUse("GPU-a", 10**12, 10**12, "nvml_pid")


def test_the_source_is_that_of_the_last_reading():
    tally = Tally()
    add(tally, 90)
    add(tally, 80, source="reserved_overhead")
    assert (tally.use.source, tally.use.peak_bytes, tally.use.nbytes) == ("reserved_overhead", 90, 80)


@pytest.mark.parametrize(("counted", "budget"), [(0, 7), (-1, None), (5, 7), (9, 9)])
def test_the_budget_of_a_process(counted, budget):
    assert budget_of(snapshot(budget_bytes=counted), 7) == budget


@pytest.mark.parametrize(("counted", "budget"), [(0, None), (-1, None), (5, 5)])
def test_the_budget_of_a_process_where_the_run_has_none(counted, budget):
    assert budget_of(snapshot(budget_bytes=counted), None) == budget


def test_what_is_said():
    figure = Figure(6_212_345_678, 1, "nvml_pid")
    assert exceeded(snapshot(), figure, 6 * 10**9) == (
        "pid 4711 holds 6.21 GB on its GPU (NVML), 212 MB over the budget of 6 GB (6,212,345,678 bytes)"
    )
    assert exceeded(snapshot(rank=1), figure, 6 * 10**9).startswith("rank 1 holds")
