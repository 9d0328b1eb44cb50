"""A PyTorch that is not as dtrrun expects: a line says what could not be replaced, and the rest works."""

import subprocess
import sys

import pytest
import torch

import dtrrun
from dtrrun.runtime import heap
from dtrrun.runtime.dispatch import native
from dtrrun.runtime.heap import Heap
from dtrrun.runtime.patches import escapes, exports, registry


def lines_of_a_session(capfd):
    with dtrrun.budget("100MB", device="cpu"):
        kept = (torch.ones(64) * 2).sum()
    assert kept.item() == 128
    return [line for line in capfd.readouterr().err.splitlines() if "warning" in line]


def test_nothing_is_lacking_here(capfd):
    assert lines_of_a_session(capfd) == []


def test_a_function_that_is_gone(monkeypatch, capfd):
    monkeypatch.setattr(escapes, "WRITES", (*escapes.WRITES, "map9_"))
    (line,) = lines_of_a_session(capfd)
    assert line == "dtrrun: warning: " + registry.LACKS.format(
        torch.__version__, "Tensor.map9_", registry.UNSEEN
    )


MOVED = """
import sys, torch, dtrrun
from dtrrun.extensions import build
build.load(print).move(sys.argv[1])
with dtrrun.budget("100MB", device="cpu"):
    print((torch.ones(64) * 2).sum().item())
"""
"""A program for a PyTorch in whose tables a function is at another place."""


def moved(function):
    done = subprocess.run([sys.executable, "-c", MOVED, function], capture_output=True, text=True)
    return done.stdout.splitlines()[-1:], [line for line in done.stderr.splitlines() if "PyTorch" in line]


@pytest.mark.parametrize("function", ["allocate", "raw_deleter"])
def test_an_allocator_with_another_table(function):
    found, (line,) = moved(function)
    assert found == ["128.0"]
    assert line == "dtrrun: warning: " + registry.LACKS.format(
        torch.__version__, "allocator on a CPU that can be replaced", heap.WITHOUT
    )


@pytest.mark.parametrize("function", ["release_resources", "StorageImpl"])
def test_storages_with_another_table(function):
    """There is no session without."""
    found, (line,) = moved(function)
    assert found == []
    assert native.OTHER_STORAGES[0].format(torch.__version__) in line


@pytest.mark.skipif(exports.CAPSULE is None, reason="needs PyTorch 2.10")
def test_a_table_of_dlpacks_with_other_functions():
    found, (line,) = moved("ManagedTensorFromPyObjectNoSync")
    assert found == ["128.0"]
    assert "no table of DLPack's functions as in its version 1" in line


class OtherAllocator:
    """The extension, where the program has given PyTorch an allocator of its own."""

    def __init__(self, native):
        self._native = native

    def __getattr__(self, name):
        return getattr(self._native, name)

    def use_heap(self, on):
        return False


def test_another_allocator(monkeypatch, capfd):
    made = Heap.__init__
    monkeypatch.setattr(Heap, "__init__", lambda heap, mode, native: made(heap, mode, OtherAllocator(native)))
    (line,) = lines_of_a_session(capfd)
    assert "no allocator on a CPU that can be replaced" in line


@pytest.mark.skipif(exports.CAPSULE is None, reason="needs PyTorch 2.10")
def test_a_table_of_dlpacks_of_another_version(monkeypatch, capfd):
    monkeypatch.setattr(exports, "CAPSULE", object())
    (line,) = lines_of_a_session(capfd)
    assert "no table of DLPack's functions as in its version 1" in line
