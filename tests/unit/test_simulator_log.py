"""Operator logs: what is read, what is written, and the error for a wrong line."""

import json

import pytest

from dtrrun.simulator.log import (
    Annotate,
    Call,
    Constant,
    Copy,
    CopyFrom,
    LogError,
    Mutate,
    Release,
    read_log,
)
from tests.log_files import write_log

EVERYTHING = [
    Constant("w", 64),
    Call("mm", ("w", "w"), ("a", "b"), (128, 0), (-1, 1), 9118),
    Mutate("add_", ("a", "w"), (0,), 40),
    Copy("c", "a"),
    CopyFrom("c", "w"),
    Release("c"),
    Annotate("BACKWARD"),
]

CALL = {"INSTRUCTION": "CALL", "NAME": "mm", "ARGS": [], "RESULT": ["a"], "TIME": "9"}
MEMORY = {"INSTRUCTION": "MEMORY", "NAME": "a", "MEMORY": "64"}
ALIAS = {"INSTRUCTION": "ALIAS", "NAME": "a", "ALIAS": "-1"}


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "step.log"
    write_log(EVERYTHING, path)
    assert read_log(path) == EVERYTHING


def test_facts_of_our_own_are_kept(tmp_path):
    facts = {"in": [1], "bytes": 128}
    told = [
        Annotate("START", {"format": 1}),
        Constant("w", 64, {"storage": 1}),
        Call("mm", ("w",), ("a",), (128,), (-1,), 9118, facts),
        Mutate("add_", ("a",), (0,), 40, {"in": [2]}),
        Release("a", {"storage": 2}),
        Annotate("PIN", {"storage": 1}),
        Release("w"),
    ]
    path = tmp_path / "step.log"
    write_log(told, path)
    assert read_log(path) == told
    path.write_text('{"INSTRUCTION":"RELEASE","NAME":"x","DTRRUN":3}')
    with pytest.raises(LogError, match="line 1: DTRRUN is 3, not an object"):
        read_log(path)


def test_a_log_may_be_compressed(tmp_path):
    path = tmp_path / "step.log.gz"
    write_log(EVERYTHING, path)
    assert read_log(path) == EVERYTHING
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(LogError, match="not a complete gzip file"):
        read_log(path)


def test_what_stands_before_the_start_is_left_out(tmp_path):
    path = tmp_path / "step.log"
    write_log(EVERYTHING[:1], path)
    path.write_text('{"INSTRUCTION":"RELEASE","NAME":"x"}\n' + path.read_text())
    assert read_log(path) == EVERYTHING[:1]


def test_a_log_without_a_start_is_read_whole(tmp_path):
    path = tmp_path / "step.log"
    path.write_text('{"INSTRUCTION":"RELEASE","NAME":"x"}\n\n')
    assert read_log(path) == [Release("x")]


def test_numbers_may_be_numbers(tmp_path):
    lines = CALL | {"TIME": 9}, MEMORY | {"MEMORY": 64}, ALIAS | {"ALIAS": -1}
    path = tmp_path / "step.log"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_log(path) == [Call("mm", (), ("a",), (64,), (-1,), 9)]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["{"], "line 1: not JSON, as in a log that dtrrun record writes"),
        (["[1]"], r"line 1: not an object with fields: \[1\]"),
        ([{"NAME": "a"}], "line 1: no field INSTRUCTION"),
        ([{"INSTRUCTION": "FREE"}], "line 1: unknown instruction 'FREE'"),
        ([{"INSTRUCTION": "RELEASE"}], "line 1: no field NAME"),
        ([{"INSTRUCTION": "RELEASE", "NAME": 5}], "line 1: NAME is 5, not text"),
        ([MEMORY], "line 1: MEMORY of 'a' belongs to no CALL or CONSTANT"),
        ([CALL], "line 1: the log ends where MEMORY of a must follow"),
        ([CALL, ALIAS], "line 2: ALIAS of a stands where MEMORY of a must follow"),
        ([CALL, MEMORY | {"NAME": "b"}], "line 2: MEMORY of b stands where MEMORY of a must follow"),
        ([CALL, MEMORY | {"MEMORY": "-4"}], "line 2: MEMORY is -4, less than 0"),
        ([CALL, MEMORY | {"MEMORY": "4 MB"}], "line 2: MEMORY is '4 MB', not a whole number"),
        ([CALL, MEMORY | {"MEMORY": True}], "line 2: MEMORY is True, not a whole number"),
        ([CALL, MEMORY, ALIAS | {"ALIAS": "0"}], "line 3: 0 is not the index of one of its 0 arguments"),
        ([CALL | {"RESULT": []}], "line 1: mm has no RESULT"),
        ([CALL | {"ARGS": "a"}], "line 1: ARGS is 'a', not a list"),
        ([CALL | {"ARGS": [1]}], "line 1: ARGS holds 1, not the name of a tensor"),
        (
            [{"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": ["a"], "MUTATE": ["0"], "TIME": 1}],
            "line 1: '0' is not the index of one of its 1 arguments",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, told):
    path = tmp_path / "step.log"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    with pytest.raises(LogError, match=f"^{path}, {told}$"):
        read_log(path)


def ours(last_step, **facts):
    head = Annotate("START", {"format": 1, "step": 2, **facts})
    return [head, *EVERYTHING, *([Annotate("STEP", {"step": last_step})] if last_step else [])]


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (ours(None), "line 13: the log was cut off: it ends in the middle of a step"),
        (ours(2, last=3), "line 14: the log was cut off: it ends with step 2, not 3"),
    ],
)
def test_a_log_that_was_cut_off(tmp_path, log, told):
    path = tmp_path / "step.log"
    write_log(log, path)
    with pytest.raises(LogError, match=told):
        read_log(path)


@pytest.mark.parametrize("facts", [{}, {"last": 2}])
def test_a_whole_log_of_our_own(tmp_path, facts):
    path = tmp_path / "step.log"
    write_log(ours(2, **facts), path)
    assert read_log(path) == ours(2, **facts)
