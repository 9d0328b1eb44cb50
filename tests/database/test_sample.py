"""A sample of PyTorch's databases, always the same; `make conformance` runs all of it."""

from __future__ import annotations

from tests.database.__main__ import chosen, line
from tests.database.judge import CRASHED, EQUAL, FAILED
from tests.database.sweep import sweep


def test_a_sample_of_the_databases():
    results = list(sweep(chosen([], 0.0125, seed=3), jobs=2))
    bad = [result for result in results if result["status"] in (FAILED, CRASHED)]
    assert not bad, "\n".join(f"{result['name']}: {result['reasons'][0]}" for result in bad)
    assert sum(result["status"] == EQUAL for result in results) > 0.9 * len(results), line(results)
    assert sum(result["evicted"] for result in results) > 120
