"""dtrrun.profiling.knee"""

from hypothesis import given
from hypothesis import strategies as st

from dtrrun.profiling.knee import knee, within

CURVE = {100: 1.0, 80: 1.02, 60: 1.05, 40: 1.15, 30: 1.6, 25: 3.0}


def test_the_knee_is_where_it_begins_to_cost():
    assert knee(CURVE) == 40


def test_a_flat_curve_has_none_and_the_least_will_do():
    assert knee({100: 1.0, 50: 1.01, 20: 1.015}) == 20


def test_on_a_straight_line_the_least_budget():
    assert knee({100: 1.0, 50: 1.5, 0: 2.0}) == 0


def test_one_point():
    assert knee({100: 1.0}) == 100


@given(st.dictionaries(st.integers(1, 10**9), st.floats(1, 10), min_size=1), st.integers(1, 1000))
def test_units_do_not_matter(curve, factor):
    assert knee(curve) in curve
    assert knee({budget * factor: slowdown for budget, slowdown in curve.items()}) == knee(curve) * factor


def test_the_least_budget_within_a_slowdown():
    assert within(CURVE, 1.2) == 40
    assert within(CURVE, 1.049) == 80
    assert within({50: 1.5}, 1.2) is None
