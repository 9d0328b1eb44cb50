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
