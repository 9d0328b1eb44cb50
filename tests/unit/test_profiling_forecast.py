"""dtrrun.profiling.forecast"""

import pytest

from dtrrun.profiling.forecast import EVENT_NS, PRESSED, SCORE_NS, Model, scale_of
from dtrrun.profiling.trial import MeasuredStep
from dtrrun.simulator.live import PredictedStep, Prediction

US = 1000


def plain(number, wall=1000 * US, operators_ns=900 * US):
    """A step of ten operators, with 1 µs of bookkeeping each."""
    return MeasuredStep(number, wall + 10 * US, 10 * US, operators_ns, 10 * US, 0, 0)


def predicted(again, events=0, steps=3, own=600 * US, scores=0):
    found = [PredictedStep(i, own + again, own, 1, events, 0, scores) for i in range(1, steps + 1)]
    return Prediction("ok", steps * (own + again), steps * own, 1, events * steps, 0, 0, 0.0, steps=found)


def model(scale=1.5):
    return Model([plain(1, 9000 * US), plain(2), plain(3)], scale)


def test_the_scale_is_that_of_the_later_steps():
    steps = [plain(1, operators_ns=5000 * US), plain(2), plain(3)]
    assert scale_of(steps, predicted(0).steps) == pytest.approx(1.5)
    assert scale_of(steps[:1], predicted(0).steps) == pytest.approx(5000 / 600)


def test_recomputation_takes_as_much_longer_as_the_operators_do():
    slowdown = model().slowdown(predicted(200 * US, events=2, scores=5))
    bookkeeping = 1e-6 * (PRESSED * 10 * US + EVENT_NS * 2 + SCORE_NS * 5)
    assert slowdown == pytest.approx(1 + 1.5 * 0.2 + bookkeeping)


def test_with_no_evictions_there_is_the_plain_bookkeeping():
    assert model().slowdown(predicted(0)) == pytest.approx(1.01)


def test_one_step_is_better_than_none():
    assert Model([plain(1)], 1.5).slowdown(predicted(200 * US, steps=1)) == pytest.approx(1.31)
    assert model().slowdown(predicted(0, steps=0)) is None


def measured(again, bookkeeping):
    """Steps whose own work took 1 ms."""
    return [
        MeasuredStep(i, 1000 * US + again + bookkeeping, again + bookkeeping, 0, bookkeeping, 5, 5)
        for i in (1, 2, 3)
    ]


def test_what_runs_tell_moves_the_others():
    found = model()
    before = found.slowdown(predicted(400 * US, events=2))
    found.learn(predicted(200 * US, events=2), measured(450 * US, 28 * US))
    after = found.slowdown(predicted(400 * US, events=2))
    assert after > before
    assert after < 1 + 1.5 * (before - 1) + 0.03  # not all of it: one run may be noise
    found.learn(predicted(200 * US, events=2), measured(450 * US, 28 * US))
    assert found.slowdown(predicted(400 * US, events=2)) > after


def test_a_run_as_predicted_changes_nothing():
    found = model()
    before = found.slowdown(predicted(400 * US, events=2))
    found.learn(predicted(200 * US, events=2), measured(300 * US, round(PRESSED * 10 * US + EVENT_NS * 2)))
    assert found.slowdown(predicted(400 * US, events=2)) == pytest.approx(before)
