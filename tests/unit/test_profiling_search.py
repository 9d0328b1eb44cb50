"""dtrrun.profiling.search"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrrun.profiling.search import above, below, certified, find_minimum, largest, largest_below, least


@given(st.integers(1, 10**13))
def test_five_percent_less_of_what_is_above(budget):
    assert below(above(budget)) == budget
    assert below(above(budget) - 1) < budget or above(budget) == 1


class Runner:
    """A given function says which budgets work; remembers which were run."""

    def __init__(self, works):
        self.works, self.runs = works, []

    def __call__(self, budget):
        self.runs.append(budget)
        return self.works(budget)


def holds(found, known, top):
    """Check the definition: it worked, all larger ones that were run did, and one just below did not."""
    assert all(works for budget, works in known.items() if budget > found)
    if found < top:
        assert known[found]
        assert any(not known.get(budget, True) for budget in range(below(found), found))
        assert certified(known)
        assert least(known) == found
    else:
        assert found == top
        assert not certified(known)
        failed = max(budget for budget, works in known.items() if not works)
        assert above(failed) >= top  # something failed at most 5 % below the peak


TOP = 1_000_000


@given(
    st.integers(1, TOP),
    st.integers(1, TOP - 1),
    st.lists(st.tuples(st.integers(1, TOP), st.integers(1, TOP // 4)), max_size=5),
    st.lists(st.integers(1, TOP - 1), max_size=5),
)
def test_the_definition_holds_for_any_program(floor, guess, holes, before):
    """The found minimum fits the definition. `before`: budgets that were run for other reasons."""
    runner = Runner(lambda budget: budget >= floor and not any(a <= budget < a + width for a, width in holes))
    known = {budget: runner(budget) for budget in before}
    found = find_minimum(runner, guess, TOP, known)
    if known:  # for a program that works in one byte, no budget may have failed
        if any(not works for works in known.values()):
            holds(found, known, TOP)
        else:
            assert found == min(known)
    assert len(runner.runs) == len(set(runner.runs)) or set(before) & set(runner.runs)


@given(st.lists(st.booleans(), min_size=200, max_size=200))
def test_nor_does_chance_break_it(luck):
    answers = iter(luck)
    known = {}
    found = find_minimum(lambda budget: budget > 1000 and next(answers, True), TOP // 3, TOP, known)
    holds(found, known, TOP)


def test_a_guess_that_is_right_takes_two_runs():
    runner = Runner(lambda budget: budget >= 400_000)
    assert find_minimum(runner, 400_000, TOP, {}) == 400_000
    assert runner.runs == [400_000, 380_000]


@pytest.mark.parametrize("guess", [100_000, 900_000])
def test_a_guess_that_is_far_off_takes_few(guess):
    runner = Runner(lambda budget: budget >= 400_000)
    found = find_minimum(runner, guess, TOP, {})
    assert 400_000 <= found < 400_000 / 0.95 + 1
    assert len(runner.runs) <= 11


def test_a_hole_above_lifts_the_minimum():
    runner = Runner(lambda budget: budget >= 200_000 and not 600_000 <= budget < 610_000)
    known = {605_000: False, 700_000: True}
    found = find_minimum(runner, 210_000, TOP, known)
    assert found == above(605_000)
    assert runner.runs == [above(605_000)]


def test_a_hole_that_is_stepped_over():
    runner = Runner(lambda budget: budget >= 91_695 and budget != 199_883)
    known = {199_883: False}
    assert find_minimum(runner, 542_953, TOP, known) == above(199_883)
    holds(above(199_883), known, TOP)


def test_the_minimum_is_the_least_that_worked_even_between_the_rungs():
    """A check of the curve at 1.616 GB worked, and 1.545 GB, a rung of the ladder from 1.626 GB, did not."""
    known = {1_616: True}
    assert find_minimum(lambda budget: budget >= 1_600, 1_626, 2_000, known) == 1_616
    assert certified(known)


def test_nearer_the_peak_than_five_percent():
    runner = Runner(lambda budget: budget >= 980_000)
    assert find_minimum(runner, TOP, TOP, {}) == 987_500
    assert runner.runs == [950_000, 975_000, 987_500]


def test_where_nothing_works_it_is_the_peak():
    known = {}
    assert find_minimum(lambda budget: False, TOP // 2, TOP, known) == TOP
    assert least(known) is None


@given(st.integers(1, 500), st.integers(0, 600), st.integers(0, 600))
def test_the_largest_value_is_exact(low, span, limit):
    runner = Runner(lambda value: value <= limit)
    found = largest(runner, low, low + span)
    assert found == (min(limit, low + span) if limit >= low else None)
    assert len(runner.runs) == len(set(runner.runs)) <= 22
    assert all(low <= value <= low + span for value in runner.runs)


def test_values_are_doubled_then_halved():
    runner = Runner(lambda value: value <= 100)
    assert largest(runner, 8, 512) == 100
    assert runner.runs == [8, 16, 32, 64, 128, 96, 112, 104, 100, 102, 101]


@pytest.mark.parametrize(
    ("low", "high", "limit"), [(1, 1, 1), (1, 7, 3), (8, 512, 512), (8, 512, 470), (8, 512, 9)]
)
def test_the_largest_value_below(low, high, limit):
    tried = []
    found = largest_below(lambda value: tried.append(value) or value <= limit, low, high)
    assert found in tried
    assert len(tried) == len(set(tried))
    assert found <= limit
    above_it = [value for value in tried if value > limit]
    assert found == high or min(above_it) <= max(found * 1.02, found + 1)
    assert largest_below(lambda _: False, low, high) is None
