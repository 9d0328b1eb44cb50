"""dtrrun.simulator.costs and dtrrun.profiling.costs, and how dtrrun.runtime.costs reads them."""

import gzip
import json
import stat

import pytest
import torch

from dtrrun.core.host import HostMemory
from dtrrun.profiling.costs import write_costs
from dtrrun.runtime.costs import identity, read_costs
from dtrrun.simulator.costs import costs_of, settled
from dtrrun.simulator.log import START, Annotate, Call, LogError, Mutate, Release

HEAD = Annotate(START, {"torch": torch.__version__, "device": "cpu"})


def call(signature, cost, **facts):
    return Call("mm", ("t1",), ("t2",), (64,), (-1,), cost, {"signature": signature, **facts})


LOG = [
    HEAD,
    call("a", 90, bytes=64, view=True),
    call("b", 50, bytes=640, again=64),
    Mutate("add_", ("t2",), (0,), 7, {"signature": "c", "bytes": 0}),
    Mutate("aminmax.out", ("t2",), (0,), 0),
    call("a", 30, bytes=64),
    Release("t2", {"storage": 2}),
]


def test_what_was_known_in_the_end():
    assert costs_of(LOG) == {"a": (30, 64), "b": (50, 64), "c": (7, 0)}


def test_a_log_as_if_it_had_been_known_before():
    log = settled(LOG, costs_of(LOG))
    assert log == [
        HEAD,
        call("a", 30, bytes=64, view=True),
        call("b", 50, bytes=64),
        Mutate("add_", ("t2",), (0,), 7, {"signature": "c", "bytes": 0}),
        Mutate("aminmax.out", ("t2",), (0,), 0),
        call("a", 30, bytes=64),
        Release("t2", {"storage": 2}),
    ]
    assert settled(LOG, {}) == LOG


def test_written_and_read_again(tmp_path):
    path = tmp_path / "costs.gz"
    write_costs(path, LOG, costs_of(LOG))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    said = []
    assert read_costs(str(path), "cpu", said.append) == (costs_of(LOG), None)
    assert said == []
    write_costs(path, LOG, costs_of(LOG), HostMemory(1000, 0.5, 0.25))
    assert read_costs(str(path), "cpu", said.append) == (costs_of(LOG), (0.5, 0.25))
    assert read_costs(str(path), "cuda", said.append) == ({}, None)
    assert "its costs are of torch" in said[0]
    assert "this is" in said[0]


def test_a_log_without_a_head(tmp_path):
    with pytest.raises(LogError):
        write_costs(tmp_path / "costs.gz", LOG[1:], {})


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"no", b'{"format": 2}', b'{"format": 1, "torch": "x"}'],
)
@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_that_is_none_of_ours_is_a_warning(tmp_path, content, compressed):
    path = tmp_path / "costs.gz"
    path.write_bytes(gzip.compress(content) if compressed else content)
    said = []
    assert read_costs(str(path), "cpu", said.append) == ({}, None)
    assert len(said) == 1
    assert str(path) in said[0]


def test_rows_that_are_wrong(tmp_path):
    path = tmp_path / "costs.gz"
    content = {"format": 1, "torch": torch.__version__, "device": "cpu", "signatures": {"a": [1]}}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    said = []
    assert read_costs(str(path), "cpu", said.append) == ({}, None)
    assert "cannot be read" in said[0]


def test_a_missing_file(tmp_path):
    said = []
    assert read_costs(str(tmp_path / "none"), "cpu", said.append) == ({}, None)
    assert len(said) == 1


def test_an_identity_is_that_of_the_operator_and_its_arguments():
    size = torch.Size((3, 4))
    key = (torch.ops.aten.add.Tensor, "alpha", 1, (size, (4, 1), 0, torch.float32))
    assert identity(key) == identity(tuple(key))
    assert len(identity(key)) == 12
    others = [
        (torch.ops.aten.mul.Tensor, *key[1:]),
        (*key[:2], 2, key[3]),
        (*key[:3], (size, (4, 1), 0, torch.float64)),
        (*key[:3], (size, (1, 3), 0, torch.float32)),
    ]
    assert len({identity(other) for other in [key, *others]}) == 5
