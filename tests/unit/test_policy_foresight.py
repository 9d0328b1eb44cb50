"""dtrrun.core.foresight: what a watched step predicts about a later one."""

import pytest

from dtrrun.core.foresight import JOIN, WatchedStep
from tests.model import ModelForesight as Foresight
from tests.model import Node


class Program:
    """A program whose operators each make one storage."""

    def __init__(self, age=0):
        self.age = age
        self.made = []

    def made_last(self):
        return reversed(self.made)

    def run(self, name, nbytes=64):
        self.age += 1
        self.made.append((self.age, name, nbytes))

    def run_all(self, names):
        for name in names:
            self.run(name)


def watched(names, begin=0, reads_last=3):
    """Return a step whose operators take 10 each and read the results of the last few operators."""
    step, program = WatchedStep(begin), Program(begin)
    for name in names:
        used = program.made[-reads_last:]
        program.run(name)
        step.add(program.age, name, 10, [(age, nbytes) for age, _, nbytes in used], [64])
    return step


def node(age, nbytes=64):
    made = Node(age, nbytes, 10)
    made.age = age
    return made


def names(count, start=0):
    return [f"op{i}" for i in range(start, start + count)]


def test_the_uses_of_what_each_operator_makes():
    step = watched(names(5))
    assert step.times == [0, 10, 20, 30, 40]
    assert step.length == 50
    assert step.uses_of(0, 64) == [10, 20, 30]
    assert step.uses_of(3, 64) == [40]
    assert step.uses_of(4, 64) == []
    assert step.uses_of(5, 64) is None


def test_operators_that_nobody_told_of_count_as_places():
    step = WatchedStep(100)
    step.add(101, "a", 10, [], [64])
    step.add(104, "b", 5, [(101, 64), (99, 64)], [64, 32, 32])
    assert step.names == ["a", "", "", "b"]
    assert step.times == [0, 10, 10, 10]
    assert step.uses == {0: {64: [10]}, 3: {64: [], 32: []}}


@pytest.mark.parametrize("begin", [0, 1000])
def test_a_step_that_is_the_same_is_followed_to_its_end(begin):
    program = Program(begin)
    foresight = Foresight(program, [watched(names(30))])
    assert foresight.horizon == 1
    for place, name in enumerate(names(30)):
        foresight.look()
        assert foresight.position == (None if place == 0 else 10 * place)  # None before anything is made
        if place > 8:
            assert foresight.next_use(node(begin + place)) == (10 * place + 10 if place < 29 else None)
            assert foresight.next_use(node(begin + place - 5)) is None
        program.run(name)
    foresight.look()
    assert foresight.position is None  # past the end of the known step
    assert foresight.horizon == 600
    assert (foresight.looks, foresight.lost) == (31, 2)


def test_storages_from_before_the_step_are_not_used_again():
    program = Program(50)
    foresight = Foresight(program, [watched(names(30))])
    program.run_all(names(10))
    foresight.look()
    assert foresight.next_use(node(50)) is None
    assert foresight.next_use(node(60)) == 110


def test_what_is_needed_when_weights_change_is_not_evicted_before():
    step, program = watched(names(30), 50), Program(50)
    step.end(lambda age: [node(one) for one in (40, 55, 80) if one > age])  # these became constants
    assert step.uses_of(4, 64) == [50, 60, 70, 300]
    foresight = Foresight(program, [step])
    program.run_all(names(6))
    foresight.look()
    held = node(55)
    assert foresight.next_use(held) == 70
    assert foresight.next_use(node(40)) is None
    program.run_all(names(6, start=6))
    foresight.look()
    assert foresight.next_use(held) == foresight.position  # as if it were used at once
    held.resident = False
    assert foresight.next_use(held) == 300
    assert foresight.next_use(node(54)) is None


def test_a_new_step_begins_at_its_begin():
    program = Program()
    foresight = Foresight(program, [watched(names(30))])
    program.run_all(names(12))
    foresight.look()
    assert foresight.position == 120
    foresight.begin()
    assert foresight.position is None
    program.run_all(names(6))
    foresight.look()
    assert foresight.position == 60
    assert foresight.next_use(node(12 + 6)) == 70
    assert foresight.next_use(node(12)) is None


def test_a_step_that_leaves_the_sequence_finds_back():
    program = Program()
    foresight = Foresight(program, [watched(names(60))])
    program.run_all(names(10))
    foresight.look()
    assert foresight.position == 100
    program.run_all(["other"] * 3)
    assert foresight.look()
    assert foresight.position is None
    program.run_all(names(JOIN - 1, start=30))
    foresight.look()
    assert foresight.position is None
    program.run_all(names(5, start=30 + JOIN - 1))
    assert foresight.look()
    assert foresight.position == 10 * (30 + JOIN + 4)
    assert foresight.lost == 2
    assert foresight.next_use(node(program.age)) == foresight.position + 10
    assert foresight.next_use(node(10)) is None
    assert foresight.next_use(node(12)) == foresight.position + foresight.horizon // 4  # made while lost


def test_it_joins_ahead_of_where_it_left_never_behind():
    program = Program()
    loop = [f"op{i % 5}" for i in range(30)]
    foresight = Foresight(program, [watched(loop)])
    program.run_all(loop[:12])
    foresight.look()
    program.run("other")
    foresight.look()
    program.run_all(loop[:JOIN])
    foresight.look()
    assert foresight.position == 10 * (15 + JOIN)


def test_a_next_use_is_the_same_whoever_has_asked_before():
    """It does not depend on earlier questions, even if a storage was first taken for another."""
    step = watched([*names(20), "op9", "x", "y", "z", *names(20)], reads_last=6)
    found = []
    for asks in (True, False):
        program = Program()
        foresight = Foresight(program, [step])
        program.run_all(names(10))
        foresight.look()
        storage = node(10)
        if asks:
            assert foresight.next_use(storage) == 110
        program.run_all("xyz")
        assert foresight.look()
        found.append(foresight.next_use(storage))
    assert found == [250, 250]


def test_two_kinds_of_steps_by_turns():
    program = Program()
    one, other = names(20), [f"b{i}" for i in range(20)]
    foresight = Foresight(program, [watched(one), watched(other)])
    for step in (one, other, other, one):
        program.run_all(step[:10])
        foresight.look()
        assert foresight.position == 100
        program.run_all(step[10:])
        foresight.begin()


def test_a_program_that_is_another_is_never_foreseen():
    program = Program()
    foresight = Foresight(program, [watched(names(30))])
    for i in range(30):
        program.run(f"else{i}")
        foresight.look()
        assert foresight.position is None
    assert foresight.lost == foresight.looks


def test_sizes_may_be_others():
    program = Program()
    foresight = Foresight(program, [watched(names(30))])
    for name in names(10):
        program.run(name, 128)
    foresight.look()
    assert foresight.position == 100
    assert foresight.next_use(node(9, 128)) == 110


def test_of_steps_of_the_same_operators_that_with_the_same_sizes_is_followed():
    small, large = WatchedStep(), WatchedStep()
    for place, name in enumerate(names(30)):
        small.add(place + 1, name, 10, [], [64])
        large.add(place + 1, name, 30, [], [128])
    for nbytes, position in ((128, 300), (64, 100), (96, 100)):
        program = Program()
        foresight = Foresight(program, [small, large])
        for name in names(10):
            program.run(name, nbytes)
        foresight.look()
        assert foresight.position == position


def test_a_join_prefers_the_same_sizes():
    step = WatchedStep()
    for place in range(40):
        step.add(place + 1, f"op{place % 5}", 10, [], [128 if place >= 20 else 64])
    program = Program()
    foresight = Foresight(program, [step])
    program.run("other")
    foresight.look()
    for place in range(6):
        program.run(f"op{place % 5}", 128)
    foresight.look()
    assert foresight.position == 10 * 26
