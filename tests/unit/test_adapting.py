"""dtrrun.runtime.adapting: by how much a budget is changed, and how often."""

from types import SimpleNamespace

import pytest

from dtrrun.core.eviction import Refusal
from dtrrun.runtime.adapting import MOST_LOWERED, Adapting
from dtrrun.telemetry.advice import Advised


class Session:
    """A session with a budget of 1000 bytes, on a device that has some memory."""

    def __init__(self, most=100_000, advised=Advised()):  # noqa: B008 - it is immutable
        self.told, self.most, self.left = [], most, False
        self.steps = SimpleNamespace(count=2)
        self.ledger = SimpleNamespace(
            budget_bytes=1000, evicting=True, versions={}, set_budget=self.set_budget
        )
        self.device = SimpleNamespace(type="cuda", most_bytes=lambda: self.most, set_budget=self.told.append)
        self.adapting = Adapting(self, lambda *_: advised)

    def set_budget(self, nbytes):
        self.ledger.budget_bytes = nbytes

    def tell(self, text):
        self.told.append(text)

    def needs(self, least):
        """Return the budget after a refusal that needs this many bytes, or None if it is not raised."""
        raised = self.adapting.too_small(Refusal("aten.mm", 10, least))
        return self.ledger.budget_bytes if raised else None

    def gets(self, most):
        return self.ledger.budget_bytes if self.adapting.refused(most) else None


def test_each_raise_leaves_twice_the_margin():
    session = Session(advised=Advised(least=1, expected=1, likely=1))
    budgets = [session.needs(1600) for _ in range(7)]
    assert budgets == [1700, 1913, 2392, 3589, 7180, 14362, 28726]
    assert [one["from_bytes"] for one in session.adapting.changes] == [1000, *budgets[:-1]]
    assert {(one["step"], one["reason"], one["operator"]) for one in session.adapting.changes} == {
        (3, "too small", "aten.mm")
    }


def test_what_a_rehearsal_knows_is_raised_to_at_once():
    session = Session(advised=Advised(least=1200, expected=5000, likely=3000))
    assert session.needs(1200) == 3000
    assert session.needs(3100) == 5000
    assert session.needs(5100) == 5100 + 5100 // 4


def test_a_program_that_has_not_begun_to_compute_gets_a_quarter():
    session = Session()
    assert [session.needs(1200), session.needs(1600), session.needs(2500)] == [1500, 2400, 5000]


def test_advice_that_fails_is_none():
    session = Session()
    session.adapting = Adapting(session, lambda *_: 1 / 0)
    assert session.needs(1200) == 1500


def test_there_is_no_more_than_there_is():
    session = Session(most=2000, advised=Advised(least=1, expected=9000, likely=9000))
    assert session.needs(1900) == 2000
    assert "from 1 kB to 2 kB, which is all that there is: aten.mm, with what must stay, " in session.told[0]
    assert session.needs(2001) is None
    assert session.adapting.hint(2001) == (
        "The budget was not raised (--over-budget raise): the device has 2 kB for it at most"
    )
    assert session.adapting.hint(2000) == ""
    assert len(session.adapting.changes) == 1


@pytest.mark.parametrize("state", ["no budget", "no eviction", "left"])
def test_nothing_is_changed_where_no_budget_holds(state):
    session = Session()
    session.ledger.evicting = state != "no eviction"
    session.left = state == "left"
    if state == "no budget":
        session.ledger.budget_bytes = None
    assert session.needs(1200) is None
    assert state == "left" or session.gets(500) is None


def test_a_budget_is_lowered_a_few_times_and_no_more_once_that_was_too_much():
    session = Session()
    assert [session.gets(most) for most in (900, 900, 950, 0)] == [900, None, None, None]
    assert session.needs(1000) is not None
    assert session.gets(700) is None
    session = Session()
    assert session.needs(1100) is not None
    assert [session.gets(900 - one) for one in range(MOST_LOWERED)] == [
        900 - one for one in range(MOST_LOWERED)
    ]
    assert session.gets(100) is None
    assert session.told[-2].startswith("the budget is lowered from 894 B to 893 B: the device has no more")


@pytest.fixture
def clock(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr("dtrrun.runtime.adapting.now_ns", lambda: int(seconds[0] * 1e9))
    return seconds


def budgets(session, clock, steps, step_seconds=1.0):
    """Let steps end. Return the budgets after each change."""
    found = []
    for _ in range(steps):
        clock[0] += step_seconds
        before = session.ledger.budget_bytes
        session.adapting.step_ended()
        if session.ledger.budget_bytes != before:
            found.append(session.ledger.budget_bytes)
    return found


def test_a_budget_that_was_lowered_rises_again_once_there_has_been_memory_for_a_while(clock):
    session = Session(most=700)
    assert budgets(session, clock, 20) == []
    assert session.gets(700) == 700
    assert budgets(session, clock, 20) == []
    session.most = 100_000
    assert budgets(session, clock, 4) == []
    session.most = 700  # it was free for a moment
    assert budgets(session, clock, 20) == []
    session.most = 100_000
    assert budgets(session, clock, 20) == [1000]  # what was given, not more
    assert session.adapting.changes[-1] | {"seconds": 0} == {
        "seconds": 0,
        "step": 3,
        "from_bytes": 700,
        "to_bytes": 1000,
        "reason": "free",
        "operator": None,
        "least_bytes": None,
    }
    assert session.told[-2].startswith(
        "the budget is raised from 700 B to 1 kB again: the device has had memory"
    )


def test_it_rises_as_far_as_there_is_memory_and_later_the_rest_of_the_way(clock):
    session = Session(most=400)
    assert session.gets(400) == 400
    session.most = 410  # not worth a change
    assert budgets(session, clock, 20) == []
    session.most = 900
    clock[0] += 10
    session.adapting.step_ended()
    session.most = 800
    assert budgets(session, clock, 20) == [800]
    session.most = 2000
    assert budgets(session, clock, 20) == [1000]
    assert budgets(session, clock, 20) == []


def test_a_neighbour_that_comes_and_goes_is_waited_for_longer_each_time(clock):
    session, waits = Session(), []
    for _ in range(MOST_LOWERED):
        assert session.gets(500) == 500
        began = clock[0]
        while session.ledger.budget_bytes == 500:
            budgets(session, clock, 1, 0.1)
        waits.append(clock[0] - began)
    assert all(5 * 2**time <= wait <= 5 * 2**time * 1.3 + 0.2 for time, wait in enumerate(waits))
    assert session.gets(500) is None


def test_a_budget_of_the_programs_own_stays(clock):
    session = Session()
    assert session.gets(500) == 500
    session.set_budget(600)
    assert budgets(session, clock, 100) == []


def test_a_raise_in_the_meantime_is_as_good(clock):
    session = Session()
    assert session.gets(500) == 500
    assert session.needs(2000) > 2000
    assert budgets(session, clock, 100) == []
    session = Session()
    assert session.gets(500) == 500
    assert session.needs(600) < 1000
    assert budgets(session, clock, 100) == [1000]
    assert session.gets(500) is None
