"""`views.rates`: events per second."""

import pytest
from fake_records import snapshot

from dtrrun.views.rates import Rates


def test_rate_over_the_last_seconds() -> None:
    rates = Rates()
    for seconds in range(5):
        rates.add([snapshot(seconds=seconds)])
    assert rates.rate(4711, "evictions") == pytest.approx(56)
    assert rates.rate(4711, "rematerializations") == pytest.approx(45)
    assert rates.steps(4711) == pytest.approx(2.5)


def test_one_look_gives_no_rate() -> None:
    rates = Rates()
    assert rates.rate(4711, "evictions") == 0
    assert rates.steps(4711) == 0
    rates.add([snapshot()])
    assert rates.rate(4711, "evictions") == 0


def test_an_old_burst_is_forgotten() -> None:
    rates = Rates()
    for seconds in range(6):
        rates.add([snapshot(seconds=seconds, evictions=0 if seconds == 0 else 1000)])
    assert rates.rate(4711, "evictions") == 0
    assert rates.rate(4711, "evictions", window=10) == pytest.approx(200)


def test_steps_that_take_longer_than_we_remember() -> None:
    rates = Rates()
    for seconds in range(0, 40, 5):
        rates.add([snapshot(seconds=seconds, steps=2, wall_ns=int(1e9) * (seconds + 25))])
    assert rates.steps(4711) == pytest.approx(2 / 60)


def test_processes_are_told_apart_and_forgotten() -> None:
    rates = Rates()
    rates.add([snapshot(1, evictions=0), snapshot(2, evictions=0)])
    rates.add([snapshot(1, seconds=1, evictions=5), snapshot(2, seconds=1, evictions=9)])
    assert (rates.rate(1, "evictions"), rates.rate(2, "evictions")) == (5, 9)
    rates.add([snapshot(1, seconds=2)])
    assert rates.rate(2, "evictions") == 0
