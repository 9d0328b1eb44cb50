"""dtrrun.runtime.observe.step_log: what it writes can be read as the paper's format."""

import gzip

import pytest

from dtrrun.runtime.observe.step_log import StepLog, open_log
from dtrrun.simulator.log import Call, Constant, Mutate, Release, read_log
from dtrrun.simulator.schedule import read_schedule

WHOLE, ROW = ((4, 4), (4, 1), 0), ((4,), (1,), 4)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "step.log")


def written(path):
    log = StepLog(path)
    log.annotate("START", {"format": 1})
    log.constant(1, 64, {"storage": 1})
    log.call("mul", [(1, WHOLE)], [(2, 64, WHOLE)], [], [], 9, {"a": 1})
    log.call("select", [(2, WHOLE)], [], [(2, ROW)], [], 1, {"a": 2})
    log.call("add_", [(2, ROW), (1, WHOLE)], [], [], [2], 5, {"a": 3})
    log.call("select", [(2, WHOLE)], [], [(2, ROW)], [], 1, {"a": 4})
    log.call("item", [(2, ROW)], [], [], [], 2, {"a": 5})
    log.call("aminmax.out", [(1, WHOLE), (2, WHOLE)], [(3, 64, WHOLE)], [], [2], 7, {"a": 6})
    log.released(2)
    log.close()


def test_names_of_views_end_with_a_mutation(path):
    written(path)
    _, *log = read_log(path)
    assert log == [
        Constant("t1", 64, {"storage": 1}),
        Call("mul", ("t1",), ("t2",), (64,), (-1,), 9, {"a": 1}),
        Call("select", ("t2",), ("t2v1",), (0,), (0,), 1, {"a": 2}),
        Release("t2v1"),
        Mutate("add_", ("t2", "t1"), (0,), 5, {"a": 3}),
        Call("select", ("t2",), ("t2v2",), (0,), (0,), 1, {"a": 4}),
        Call("item", ("t2v2",), ("n1",), (0,), (-1,), 2, {"a": 5}),
        Release("n1"),
        Call("aminmax.out", ("t1", "t2"), ("t3",), (64,), (-1,), 7, {"a": 6}),
        Release("t2v2"),
        Mutate("aminmax.out", ("t1", "t2"), (1,), 0),
        Release("t2", {"storage": 2}),
    ]
    assert read_schedule(path).peak_bytes == 64 + 3 * 64  # both versions, while the new one is made


def test_it_has_its_name_only_when_it_is_whole(path, tmp_path):
    log = StepLog(path)
    assert open_log(path) is None  # another process is writing it
    log.discard()
    assert list(tmp_path.iterdir()) == []
    written(path)
    assert [file.name for file in tmp_path.iterdir()] == ["step.log"]


def test_the_same_step_gives_the_same_bytes(path, tmp_path):
    for name in ("a.gz", "b.gz"):
        written(str(tmp_path / name))
    first, second = ((tmp_path / name).read_bytes() for name in ("a.gz", "b.gz"))
    written(path)
    assert first == second
    assert gzip.decompress(first) == (tmp_path / "step.log").read_bytes()
