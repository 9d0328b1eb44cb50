"""Operators in the contexts that a program can set: a sample; `make conformance` runs all of it."""

from __future__ import annotations

from itertools import combinations, product

from tests.database.__main__ import IN_CONTEXT, chosen, line
from tests.database.contexts import LEVELS, NOT_TOGETHER, Context, covering
from tests.database.judge import CRASHED, FAILED
from tests.database.sweep import sweep


def test_each_pair_of_settings_comes_together_in_some_context():
    fields = [
        [(name, value) for value in values] for name, values in zip(Context._fields, LEVELS, strict=True)
    ]
    found = {pair for context in covering() for pair in combinations(context._asdict().items(), 2)}
    wanted = {pair for one, other in combinations(fields, 2) for pair in product(one, other)}
    assert found == wanted - set(NOT_TOGETHER.items())


def test_a_sample_of_operators_in_contexts():
    results = list(sweep(chosen([], 0.5, seed=3, kinds=(f"{IN_CONTEXT}_sample",)), jobs=1))
    bad = [result for result in results if result["status"] in (FAILED, CRASHED)]
    assert not bad, "\n".join(f"{result['name']}: {result['reasons'][0]}" for result in bad)
    assert sum(result["evicted"] for result in results) > 250, line(results)
