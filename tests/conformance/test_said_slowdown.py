"""The slowdown that is said is the one that is measured, where dtrrun's own work is all that a step loses."""

from statistics import median

import pytest

from tests.bench.said import small
from tests.bench.small_operators import cells, distributions, graph

WITHIN = 0.12  # `python -m tests.bench said` is stricter, and repeats more


@pytest.mark.parametrize("program", [cells, distributions, graph])
def test_what_is_said_is_measured(program):
    measured, said = small(program, rounds=5, steps=8)
    assert median(said) == pytest.approx(median(measured), rel=WITHIN)
