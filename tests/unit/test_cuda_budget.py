"""dtrrun.runtime.cuda.budget"""

from hypothesis import given
from hypothesis import strategies as st

from dtrrun.runtime.cuda.budget import (
    CONTEXT,
    FORGET_SEARCHES,
    IDLE,
    LEAST_GUARD,
    LEAST_SLACK,
    MANY_SEARCHES,
    MIB,
    SEGMENT,
    Accounts,
)

GB = 10**9


def looked(accounts, reserved, used, driver=None, now=0.0):
    accounts.look(reserved, used, driver, now)
    return accounts


def test_the_cap_leaves_room_for_the_context_and_a_guard():
    accounts = looked(Accounts(6 * GB), 0, 500 * MIB)
    assert accounts.overhead == 500 * MIB
    assert accounts.guard == 6 * GB // 50
    assert accounts.cap == 6 * GB - 500 * MIB - 6 * GB // 50


def test_a_small_budget_has_the_least_guard():
    assert looked(Accounts(1 * GB), 0, 0).guard == LEAST_GUARD


def test_a_budget_that_the_context_takes_leaves_nothing():
    assert looked(Accounts(200 * MIB), 0, 500 * MIB).cap == 0


def test_without_a_budget_there_is_no_cap():
    accounts = looked(Accounts(None), 10, 500 * MIB)
    assert (accounts.cap, accounts.overhead) == (None, 500 * MIB - 10)
    assert accounts.limit(5, 5) == 1 << 62


def test_other_processes_do_not_count():
    # More than a context can take: other processes were there first, so an estimate is used for ours.
    accounts = looked(Accounts(6 * GB), 0, IDLE + 10 * GB)
    assert accounts.overhead == CONTEXT
    looked(accounts, 2 * GB, IDLE + 12 * GB + 5 * MIB)
    assert accounts.overhead == CONTEXT + 5 * MIB


def test_the_drivers_figure_counts_once_the_allocator_has_been_still():
    accounts = looked(Accounts(6 * GB), 1 * GB, 1 * GB + 500 * MIB)
    looked(accounts, 2 * GB, 2 * GB + 500 * MIB, driver=(1 * GB, 0.5), now=1.0)  # an old figure
    assert accounts.overhead == 500 * MIB
    looked(accounts, 2 * GB, 2 * GB + 500 * MIB, driver=(1 * GB, 0.5), now=2.0)
    assert accounts.overhead == 500 * MIB
    looked(accounts, 2 * GB, 2 * GB + 500 * MIB, driver=(2 * GB + 400 * MIB, 1.5), now=2.0)
    assert accounts.overhead == 400 * MIB  # 100 MiB belong to another process
    looked(accounts, 3 * GB, 3 * GB + 510 * MIB, now=4.5)
    assert accounts.overhead == 410 * MIB


def test_another_processs_memory_is_not_ours_once_the_driver_tells():
    accounts = looked(Accounts(6 * GB), 1 * GB, 1 * GB + 500 * MIB, driver=(1 * GB + 500 * MIB, 0.0))
    before = accounts.cap
    looked(accounts, 1 * GB, 3 * GB + 500 * MIB, now=1.0)
    assert accounts.overhead > 2 * GB
    assert accounts.guard > 2 * GB  # it may keep growing
    looked(accounts, 1 * GB, 3 * GB + 500 * MIB, driver=(1 * GB + 500 * MIB, 2.0), now=2.0)
    assert (accounts.overhead, accounts.guard, accounts.cap) == (500 * MIB, 6 * GB // 50, before)
    # Growth that is ours stays so, by the device's figure and by the driver's.
    looked(accounts, 1 * GB, 3 * GB + 800 * MIB, now=3.0)
    looked(accounts, 1 * GB, 3 * GB + 800 * MIB, driver=(1 * GB + 800 * MIB, 4.0), now=4.0)
    assert (accounts.overhead, accounts.guard) == (800 * MIB, 300 * MIB + SEGMENT)


def test_what_grows_without_a_first_call_may_be_disowned():
    accounts = looked(Accounts(6 * GB), 0, 500 * MIB)
    accounts.look(0, 800 * MIB, None, 1.0, loaded=True)  # a library was loaded
    looked(accounts, 0, 810 * MIB)  # too little to be another process
    assert accounts.disown() == 0
    looked(accounts, 0, 2 * GB)
    assert accounts.disown() == 2 * GB - 810 * MIB
    assert looked(accounts, 0, 2 * GB).overhead == 810 * MIB
    assert accounts.disown() == 0
    # That process ends. It had more than was known, but our context is still there.
    assert looked(accounts, 0, 520 * MIB).overhead == 500 * MIB
    assert looked(accounts, 0, 400 * MIB).overhead == 400 * MIB


def test_the_guard_grows_at_once_and_shrinks_slowly():
    accounts = looked(Accounts(2 * GB), 0, 300 * MIB)
    assert accounts.guard == LEAST_GUARD
    looked(accounts, 0, 500 * MIB)
    grown = accounts.guard
    assert grown == 200 * MIB + SEGMENT
    looked(accounts, 0, 500 * MIB)
    assert LEAST_GUARD < accounts.guard < grown
    for _ in range(200):
        looked(accounts, 0, 500 * MIB)
    assert LEAST_GUARD <= accounts.guard < LEAST_GUARD + 8  # bytes


def test_the_first_look_is_no_growth():
    assert looked(Accounts(6 * GB), 0, 700 * MIB).guard == 6 * GB // 50


def test_what_the_ledger_does_not_know_of_lowers_its_limit():
    accounts = looked(Accounts(2 * GB), 0, 300 * MIB)
    plain = accounts.limit(1 * GB, 1 * GB)
    assert plain == accounts.cap - LEAST_SLACK
    assert accounts.limit(1 * GB + 32 * MIB, 1 * GB) == plain - 32 * MIB
    assert accounts.limit(1 * GB, 1 * GB + 32 * MIB) == plain  # tensors whose death has not been seen yet


def test_fragmentation_lowers_the_limit_and_is_forgotten():
    accounts = looked(Accounts(2 * GB), 0, 300 * MIB)
    before = accounts.limit(0, 0)
    accounts.request_failed(accounts.cap - 200 * MIB, 100 * MIB)
    assert accounts.slack == 200 * MIB
    assert accounts.limit(0, 0) == before + LEAST_SLACK - 200 * MIB
    accounts.step_ended(False)
    assert accounts.slack == 175 * MIB
    for _ in range(300):
        accounts.step_ended(False)
    assert accounts.slack == LEAST_SLACK


def test_a_full_allocator_is_not_fragmented():
    accounts = looked(Accounts(2 * GB), 0, 300 * MIB)
    accounts.request_failed(accounts.cap - 50 * MIB, 100 * MIB)
    assert accounts.slack == LEAST_SLACK


def test_the_ledger_runs_short_first_where_the_allocator_would_search_too_often():
    accounts = looked(Accounts(2 * GB), 0, 300 * MIB)

    def step_with(searches: int, unused: int) -> int:
        accounts.step_ended(False, [unused] * searches)
        return accounts.slack

    assert step_with(MANY_SEARCHES - 1, 8 * MIB) == LEAST_SLACK
    assert step_with(MANY_SEARCHES, 8 * MIB) == LEAST_SLACK + 8 * MIB
    for _ in range(FORGET_SEARCHES - 1):
        assert step_with(1, 8 * MIB) == LEAST_SLACK + 8 * MIB
    assert step_with(0, 0) == LEAST_SLACK


def test_another_budget():
    accounts = looked(Accounts(2 * GB), 0, 300 * MIB)
    accounts.set_budget(None)
    assert accounts.cap is None
    accounts.set_budget(4 * GB)
    assert looked(accounts, 0, 300 * MIB).cap == 4 * GB - 300 * MIB - accounts.guard


SIZES = st.integers(0, 1 << 38)
SHOWN = st.none() | st.tuples(SIZES, st.floats(0, 800))
LOOKS = st.tuples(SIZES, SIZES, SHOWN, st.floats(0, 100), SIZES, SIZES)


@given(st.integers(1, 1 << 38), st.lists(LOOKS, min_size=1, max_size=8))
def test_never_more_than_the_budget(budget, looks):
    accounts = Accounts(budget)
    now = 0.0
    for reserved, beyond, driver, later, allocated, wanted in looks:
        now += later
        looked(accounts, reserved, reserved + beyond, driver, now)
        assert accounts.guard >= LEAST_GUARD
        assert accounts.overhead >= 0
        assert 0 <= accounts.cap <= max(budget - accounts.overhead - accounts.guard, 0)
        accounts.request_failed(allocated, wanted)
        assert 0 <= accounts.limit(allocated, min(allocated, wanted)) <= accounts.cap
        assert accounts.slack <= accounts.cap // 4
