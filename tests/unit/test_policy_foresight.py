"""dtrrun.policy.foresight: what a recorded step tells of the next one."""

from dtrrun.policy import HeapSearch, ScanSearch, make_heuristic
from dtrrun.policy.foresight import JOIN, Foresight, step_of
from tests.unit.policy_world import Record

OPERATORS = [("a", ["w", "x"], 10), ("b", ["x", "y"], 20), ("c", ["y", "z"], 5), ("d", ["x", "z"], 1)]
STEP = step_of(OPERATORS, kept=["z"])


def test_the_next_use_of_all_that_an_operator_touches():
    assert STEP.times == [0, 10, 30, 35]
    assert STEP.length == 36
    assert STEP.next_uses == [(None, 10), (35, 30), (None, 35), (None, 36)]


def test_a_step_that_is_the_same_is_followed_to_its_end():
    foresight = Foresight(STEP)
    for place, (key, *_) in enumerate(OPERATORS):
        assert foresight.follow(key) == STEP.next_uses[place]
        assert foresight.position == STEP.times[place]
    assert foresight.follow("e") is None
    assert foresight.position is None
    foresight.again()
    assert foresight.follow("a") == STEP.next_uses[0]
    assert foresight.horizon == 72


def long_step(count=40):
    return step_of([(f"op{i}", [i, i + 1], 10) for i in range(count)], kept=[])


def test_a_step_that_leaves_the_sequence_finds_back():
    foresight = Foresight(long_step())
    known = [foresight.follow(f"op{i}") for i in range(10)]
    assert None not in known
    assert [foresight.follow(f"other{i}") for i in range(3)] == [None] * 3
    joined = [foresight.follow(f"op{i}") for i in range(20, 30)]
    assert joined[: JOIN - 1] == [None] * (JOIN - 1)
    assert None not in joined[JOIN - 1 :]
    assert foresight.position == 290
    assert foresight.lost == 3 + JOIN - 1


def test_it_joins_ahead_of_where_it_left_never_behind():
    step = step_of([(f"op{i % 5}", [i], 10) for i in range(30)], kept=[])
    foresight = Foresight(step)
    for i in range(12):
        foresight.follow(f"op{i % 5}")
    foresight.follow("other")
    for i in range(JOIN):
        foresight.follow(f"op{i}")
    assert foresight.position == step.times[15 + JOIN - 1]


def test_the_choice_follows_the_next_use():
    heuristic = make_heuristic("h_chain(c=ancestors,s=0,next=1,released=alike)")
    for search in (HeapSearch, ScanSearch):
        policy = search(heuristic)
        soon, late, never = (Record(name, 64, 10) for name in (1, 2, 3))
        soon.next_use, late.next_use = 5, 500
        for node in (soon, late, never):
            policy.insert(node)
        policy.foresee(0, 1000)
        order = []
        for _ in range(3):
            node = policy.select(1, lambda node: True)
            order.append(node)
            policy.discard(node)
        assert [node is other for node, other in zip(order, (never, late, soon), strict=True)] == [True] * 3


def test_what_has_been_used_counts_with_its_new_next_use():
    heuristic = make_heuristic("h_chain(c=ancestors,s=0,next=1,released=alike)")
    policy = HeapSearch(heuristic)
    first, second = Record(1, 64, 10), Record(2, 64, 10)
    first.next_use, second.next_use = 10, 20
    for node in (first, second):
        policy.insert(node)
    policy.foresee(0, 1000)
    assert policy.select(1, lambda node: True) is second
    policy.foresee(10, 1000)
    first.next_use = 900
    policy.used(first)
    assert policy.select(1, lambda node: True) is first


def test_an_evicted_dependent_is_a_use_to_come():
    heuristic = make_heuristic("h_chain(c=ancestors,s=0,next=1,released=alike)")
    for search in (HeapSearch, ScanSearch):
        policy = search(heuristic)
        source, other = Record(1, 64, 10), Record(2, 64, 10)
        child = Record(3, 64, 10, inputs=[source])
        other.next_use, child.next_use = 100, 5
        for node in (source, other, child):
            policy.insert(node)
        policy.foresee(0, 1000)
        assert policy.select(1, lambda node: True) is source
        child.resident = False
        policy.evicted(child)
        assert policy.select(1, lambda node: True) is other
        child.resident = True
        policy.rematerialized(child)
        assert policy.select(1, lambda node: True) is source


def test_while_nothing_is_foreseen_next_uses_do_not_count():
    policy = HeapSearch(make_heuristic("h_chain(c=ancestors,s=1,next=1,released=alike)"))
    old, new = Record(1, 64, 10, now=0), Record(2, 64, 10, now=50)
    old.next_use, new.next_use = 101, 900
    for node in (old, new):
        policy.insert(node)
    policy.foresee(100, 1000)
    assert policy.select(100, lambda node: True) is new
    policy.foresee(None, 1000)
    assert policy.select(100, lambda node: True) is old
    policy.foresee(100, 1000)
    assert policy.select(100, lambda node: True) is new
