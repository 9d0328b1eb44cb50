"""dtrrun.smoke: what passes, what fails, and the messages."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from dtrrun.cli import smoke as verb
from dtrrun.launch.captured import Captured
from dtrrun.settings import RuntimeSettings
from dtrrun.smoke.checks import (
    DOES_NOT_REPEAT,
    NAMES,
    Check,
    check_peak,
    check_run,
    check_slowdown,
    check_state,
    differences,
    skipped,
)
from dtrrun.smoke.junit import junit
from dtrrun.smoke.runs import Run
from dtrrun.telemetry.driver import DriverUse
from tests.unit.fake_records import snapshot

ENDED = Captured(0, 12.5, "", False)


def steps(*seconds):
    return [{"index": 1 + place, "wall_ns": int(one * 1e9)} for place, one in enumerate(seconds)]


def a_run(*states, error=None, seconds=(9.0, 1.0, 1.2, 1.1), **counters):
    counters = {"device_index": -1} | counters
    shown = snapshot(tables={"latest_steps": steps(*seconds)}, ended=True, **counters)
    return Run(ENDED, error, (shown,), states)


def state(step=3, **digests):
    return {"step": step, "digests": {"weight": "a", "bias": "b"} | digests}


def test_a_run_that_ends_well():
    check = check_run("plain run", a_run(evictions=0))
    assert check == Check("plain run", True, "42 steps in 12.5 s", 12.5)
    assert check_run("x", a_run(evictions=1234)).detail == "42 steps in 12.5 s, 1,234 evictions"


def test_a_run_that_does_not():
    assert check_run("x", a_run(error="exit status 1")) == Check("x", False, "exit status 1", 12.5)
    none = check_run("x", a_run(steps=0))
    assert (none.passed, none.detail) == (False, "the script made no optimizer step")


def test_a_program_that_does_not_repeat():
    plain, other = a_run(state()), a_run(state(weight="c"))
    assert DOES_NOT_REPEAT not in check_state(plain, other, lambda: plain).detail
    check = check_state(plain, other, lambda: a_run(state(weight="d")))
    assert (check.passed, check.detail) == (False, f"1 of 2 differ: weight; {DOES_NOT_REPEAT}")


def test_the_same_state():
    check = check_state(a_run(state(), state(other="c")), a_run(state(), state(other="c")))
    assert (check.passed, check.detail) == (True, "5 tensors and values, the same bits")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((state(weight="z"),), "1 of 2 differ: weight"),
        ((state(weight="z", bias="z"),), "2 of 2 differ: weight, bias"),
        ((state(more="z"),), "1 of 2 differ: more"),
        ((state(step=2),), "the plain run made 3 steps, the run in the budget 2"),
        ((), "plain run: 1 training processes, 0 in the budget"),
    ],
)
def test_another_state(other, said):
    check = check_state(a_run(state()), a_run(*other))
    assert (check.passed, check.detail) == (False, said)


def test_of_many_differences_three_are_named():
    one = state(**{f"t{i}": "x" for i in range(9)})
    two = state(**{f"t{i}": "y" for i in range(9)})
    assert check_state(a_run(one), a_run(two)).detail == "9 of 11 differ: t0, t1, t2 and 6 others"
    assert len(differences(one, two)) == 9


def test_the_peak():
    gpu = {"device_index": 0, "footprint_peak_bytes": 110, "over_budget": 0}
    run = a_run(peak_bytes=100, **gpu)
    assert run.peak_bytes == 110
    for source, peak in (("nvml_pid", 130), ("device_delta", 110)):  # the latter may include other processes
        [seen] = run.snapshots
        seen = replace(seen, driver=DriverUse("GPU-0", 90, 130, source))
        assert replace(run, snapshots=(seen,)).peak_bytes == peak
    assert check_peak(a_run(peak_bytes=100, over_budget=0), 100).passed
    assert not check_peak(a_run(peak_bytes=101, over_budget=0), 100).passed
    assert not check_peak(a_run(peak_bytes=99, over_budget=1), 100).passed


def test_the_slowdown_is_of_the_median_step_after_the_first():
    plain, other = a_run(seconds=(50, 1, 2, 3), steps=5), a_run(seconds=(1, 3, 3, 90), steps=5)
    assert check_slowdown(plain, other, None) == Check("slowdown", True, "1.50")
    assert check_slowdown(plain, other, 1.5).passed
    found = check_slowdown(plain, other, 1.4)
    assert (found.passed, found.detail) == (False, "1.50, at most 1.4")
    found = check_slowdown(a_run(seconds=(50, 1, 2, 3), steps=4), other, 1.4)
    assert found == Check("slowdown", None, "not measured: this needs at least 5 steps")


@pytest.mark.parametrize(
    ("budget", "least", "tried", "said"),
    [
        (None, 50, [60], "42 steps in 12.5 s, in 60% of its peak"),
        (None, 75, [60, 70, 80], "42 steps in 12.5 s, in 80% of its peak (70% is too small)"),
        (None, 95, [60, 70, 80, 90], "even 90% of its peak is too small: it takes 95 B"),
        ("60%", 75, [60], "the budget is too small: it takes 75 B"),
        ("75B", 75, [75], "42 steps in 12.5 s"),
    ],
)
def test_a_share_that_is_enough_is_looked_for_only_if_none_is_given(monkeypatch, budget, least, tried, said):
    budgets = []

    def run_once(settings, command, patience):
        if settings.budget_bytes is None:
            return a_run(state(), peak_bytes=100)
        budgets.append(settings.budget_bytes)
        if settings.budget_bytes >= least:
            return a_run(state(), peak_bytes=settings.budget_bytes, evictions=0)
        said = f"{least} B"
        return replace(a_run(error=f"the budget is too small: it takes {said}"), too_small=said)

    monkeypatch.setattr(verb, "run_once", run_once)
    checks, failed, nbytes = verb._check(verb.Smoke(budget), RuntimeSettings(), ["python"], lambda line: None)
    assert budgets == tried
    assert checks[1].detail == said
    assert (failed is None) == (nbytes == tried[-1]) == (tried[-1] >= least) == checks[1].passed


def test_junit_says_what_failed_and_what_was_not_checked():
    checks = [Check(NAMES[0], True, "fine", 1.5), Check(NAMES[1], False, "exit status 1 <&\x00", 2.0)]
    checks += skipped(NAMES[2:], "the run failed")
    suite = ElementTree.fromstring(junit("train.py --x '<'", checks, "Traceback\x1b[31m ]]>")).find(
        "testsuite"
    )
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped", "time")} == {
        "tests": "5",
        "failures": "1",
        "skipped": "3",
        "time": "3.500",
    }
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == list(NAMES)
    assert cases[0].get("classname") == "train.py --x '<'"
    failure = cases[1].find("failure")
    assert failure.get("message") == "exit status 1 <&\ufffd"
    assert failure.text == "Traceback\ufffd[31m ]]>"
    assert all(case.find("skipped").get("message") == "the run failed" for case in cases[2:])
