"""A few operators of the database, always the same; `make conformance` checks all of it."""

import warnings

from tests.database.predicted import chosen, told, unit, worst


def test_what_operators_take_is_known_before():
    calls, wrong = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in chosen(share=0.008, seed=5):
            found = unit(name)
            calls += len(found)
            wrong += [told(one) for one in worst(found)]
    assert calls > 1000
    assert not wrong, "\n".join(wrong)
