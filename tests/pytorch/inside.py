"""A plugin for pytest: tells what became of each test. If it is asked to, everything is evicted in them."""

from __future__ import annotations

import json
import os

import pytest

from tests.care import budget

RESULTS = "DTRRUN_TEST_RESULTS"
"""Names the file of results, a line of JSON for each test."""
EVICTED = "DTRRUN_TEST_EVICTED"

evictions = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    global evictions
    evictions = 0
    if EVICTED not in os.environ:
        return (yield)
    with budget(1, "cpu", careful=False, verify=True, over_budget="evict") as session:
        try:
            result = yield
        finally:
            report = session.report()
            evictions = report["evictions"]
    assert not report["mismatches"], report["mismatches"]
    return result


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        told = {"name": report.nodeid, "outcome": report.outcome, "evictions": evictions}
        told["why"] = str(getattr(report.longrepr, "reprcrash", ""))[:500]
        with open(os.environ[RESULTS], "a") as file:
            file.write(json.dumps(told) + "\n")
