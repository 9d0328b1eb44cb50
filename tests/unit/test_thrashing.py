"""When a run warns that its steps are mostly recomputation."""

from types import SimpleNamespace

import pytest

from dtrrun.runtime.observe.thrashing import GRACE_NS, SPAN_NS, WINDOW_NS, Thrashing

MS = 1_000_000


def step(index, own_ns, overhead_ns, evictions=1, bookkeeping_ns=0):
    return {
        "index": index,
        "wall_ns": own_ns + overhead_ns + bookkeeping_ns,
        "rematerialization_ns": overhead_ns,
        "scoring_ns": 0,
        "search_ns": 0,
        "bookkeeping_ns": bookkeeping_ns,
        "evictions": evictions,
        "rematerializations": evictions,
    }


@pytest.fixture
def said():
    return []


def judge(said, max_slowdown=None, on_thrash="warn"):
    settings = SimpleNamespace(max_slowdown=max_slowdown, on_thrash=on_thrash)
    return Thrashing(settings, said.append, said.append, lambda: None)


def test_a_program_that_is_being_ended_may_save_its_model(said):
    """What it computes in `finally` belongs to the same step, and must not be stopped again."""
    thrashing = judge(said, 2.0, "stop")
    unfinished = step(3, 1 * MS, 2 * GRACE_NS)
    with pytest.raises(SystemExit):
        thrashing.watch(unfinished, GRACE_NS)
    thrashing.watch(unfinished, GRACE_NS)
    with pytest.raises(SystemExit):  # it has caught it, and goes on
        thrashing.watch(step(4, 1 * MS, 5_000 * MS))


def test_without_evictions_no_budget_would_help(said):
    for most in (None, 2.0):
        thrashing = judge(said, most, "stop")
        thrashing.watch(step(1, 1 * MS, 5_000 * MS, evictions=0))
        thrashing.watch(step(2, 1 * MS, 2 * GRACE_NS, evictions=0), GRACE_NS)
    assert said == []


def test_what_the_first_steps_take_besides_is_not_recomputation(said):
    """On a busy machine, an import in the second step took 84 times as long as the step's own work."""
    for most in (None, 2.0):
        judge(said, most, "stop").watch(step(2, 10 * MS, 5 * MS, bookkeeping_ns=840 * MS))
    assert said == []


def test_what_else_would_help_is_said(said):
    settings = SimpleNamespace(max_slowdown=2.0, on_thrash="warn")
    thrashing = Thrashing(settings, said.append, said.append, lambda: None, lambda: "Run it eagerly")
    thrashing.watch(step(1, 1 * MS, 5 * MS))
    assert said[0].endswith("a larger budget would help. Run it eagerly")


def test_a_short_step_alone_is_not_worth_a_word(said):
    """With an optimizer per parameter, stepped in backward, the first steps are slow: operators are new."""
    thrashing = judge(said)
    for index in range(200):
        thrashing.watch(step(index, 1 * MS, 30 * MS if index < 4 else 1 * MS))
    assert said == []


def test_short_steps_are_judged_together(said):
    thrashing = judge(said)
    for index in range(1, 20):
        thrashing.watch(step(index, 2 * MS, 58 * MS))
    last = -(-WINDOW_NS // (60 * MS))
    assert said[0] == (
        f"steps take more than 10 times as long as their own work (steps 1 to {last}: 30.0 times), "
        "because they recompute so much; a larger budget would help"
    )
    assert len(set(said)) == 1


def test_a_long_step_is_judged_by_itself(said):
    thrashing = judge(said)
    thrashing.watch(step(1, 100 * MS, 0))
    thrashing.watch(step(2, 1000 * MS, 20_000 * MS))
    assert "(steps 1 to 2: 19.2 times)" in said[0]
    thrashing = judge(said)
    thrashing.watch(step(1, 1000 * MS, 20_000 * MS))
    assert "(step 1: 21.0 times)" in said[1]


def test_a_limit_of_the_users_own_holds_for_each_step(said):
    with pytest.raises(SystemExit) as stopped:
        judge(said, 2.0, "stop").watch(step(3, 1 * MS, 2 * MS))
    assert stopped.value.code
    assert said == [
        "step 3 takes 3.0 times as long as its own work: stopped (--on-thrash stop); "
        "a larger budget would help"
    ]


def test_a_step_under_way_is_given_time(said):
    thrashing = judge(said)
    thrashing.watch(step(1, 100 * MS, GRACE_NS), GRACE_NS)
    assert said == []
    thrashing.watch(step(1, 100 * MS, GRACE_NS + 1), GRACE_NS)
    assert len(said) == 1


def test_a_step_that_goes_on_and_on_is_mentioned_again(said):
    """It is never ended unless the user has asked for that; the warning says how."""
    thrashing = judge(said)
    for seconds in range(10, 200, 10):
        thrashing.watch(step(4, 500 * MS, seconds * 1000 * MS, evictions=1000 * seconds), GRACE_NS)
    first, more = dict.fromkeys(said)
    assert first.startswith("steps take more than 10 times as long as their own work (step 4: 21.0 times)")
    assert more.startswith("step 4 has run 50,000 operators again in 50 s, 101 times its own work so far.")
    assert more.endswith("--max-slowdown 100 --on-thrash stop ends such a run")


def test_a_program_without_steps_is_judged_by_time(said):
    total = step(0, 0, 0)

    def goes_on(thrashing, own_ns, overhead_ns):
        nonlocal total
        more = step(0, own_ns, overhead_ns)
        total = {name: total[name] + more[name] for name in total}
        thrashing.watch_time(total)

    thrashing = judge(said)
    for _ in range(600):  # ten minutes without recomputation do not hide what follows
        goes_on(thrashing, 1000 * MS, 0)
    assert said == []
    for _ in range(2):
        goes_on(thrashing, 100 * MS, SPAN_NS)
    assert said[0].startswith("the program takes more than 10 times as long as its own work")
    thrashing = judge(said, 2.0, "stop")
    goes_on(thrashing, 0, 0)
    with pytest.raises(SystemExit):
        goes_on(thrashing, 100 * MS, SPAN_NS)
    assert said[-1].endswith("stopped (--on-thrash stop); a larger budget would help")
