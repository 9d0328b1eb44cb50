"""The reference layer: what refers to what, and when a storage's last reference is dropped."""

import pytest

from dtrrun.simulator.log import (
    BACKWARD,
    Annotate,
    Call,
    Constant,
    Copy,
    CopyFrom,
    LogError,
    Mutate,
    Release,
)
from dtrrun.simulator.schedule import schedule_of


def call(output, *inputs, nbytes=10, alias=-1, cost=1):
    return Call("op", inputs, (output,), (nbytes,), (alias,), cost)


def test_a_storage_is_released_with_its_last_reference():
    schedule = schedule_of(
        [Constant("w", 4), call("a", "w"), Copy("b", "a"), Release("a"), call("c", "b"), Release("b")], "l"
    )
    assert schedule.events == [0, 1, 2, ~1]
    assert schedule.outputs == [0, 2]
    assert (schedule.cost, schedule.constant_bytes, schedule.peak_bytes) == (2, 4, 24)


def test_a_view_holds_its_storage_and_has_no_memory_of_its_own():
    schedule = schedule_of([call("a"), call("v", "a", alias=0), Release("a"), Release("v")], "l")
    assert schedule.storage_of == [0, 0]
    assert [schedule.is_alias(one) for one in (0, 1)] == [False, True]
    assert schedule.events == [0, 1, ~0]
    assert schedule.peak_bytes == 10


def test_a_mutation_makes_a_new_storage_in_the_place_of_the_old():
    schedule = schedule_of([call("a", nbytes=10), Mutate("add_", ("a",), (0,), 5), call("b", "a")], "l")
    assert schedule.nbytes == [10, 10, 10]
    assert schedule.events == [0, 1, ~0, 2]
    assert schedule.operators[2].inputs == (1,)


def test_a_mutation_through_one_name_leaves_the_others():
    schedule = schedule_of([call("a"), Copy("b", "a"), Mutate("add_", ("a",), (0,), 5)], "l")
    assert schedule.events == [0, 1]
    assert schedule.outputs == [1, 0]


def test_copy_from_moves_a_reference():
    schedule = schedule_of([call("a"), call("b"), CopyFrom("a", "b"), Release("b")], "l")
    assert schedule.events == [0, 1, ~0]
    assert schedule.outputs == [1, 1]


def test_copy_from_itself_loses_nothing():
    assert schedule_of([call("a"), CopyFrom("a", "a")], "l").events == [0]


def test_the_largest_operator_counts_each_storage_once_and_no_constants():
    schedule = schedule_of(
        [Constant("w", 100), call("a", "w", nbytes=7), call("v", "a", alias=0), call("b", "a", "v", "w")], "l"
    )
    assert schedule.largest_bytes == 17


def test_the_backward_pass_begins_where_the_log_says():
    assert schedule_of([call("a"), Annotate(BACKWARD), call("b", "a")], "l").backward == 1


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ([call("a", "x")], r"log, instruction 1 \(CALL\): there is no tensor x"),
        ([call("a"), call("a")], r"log, instruction 2 \(CALL\): there is a tensor a already"),
        ([call("a"), Copy("b", "c")], r"log, instruction 2 \(COPY\): there is no tensor c"),
        ([call("a"), Release("a"), Release("a")], "instruction 3 .RELEASE.: released more often than"),
        ([call("a"), Mutate("add_", ("a",), (), 1)], "instruction 2 .MUTATE.: mutates nothing"),
    ],
)
def test_what_does_not_fit_together_is_named(log, told):
    with pytest.raises(LogError, match=told):
        schedule_of(log, "log")


def test_the_release_of_what_was_made_before_the_start_is_passed_over():
    assert schedule_of([Release("x")], "l").events == []
