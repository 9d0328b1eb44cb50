"""A PyTorch that is not as dtrrun expects: a line says what could not be replaced, and the rest works."""

import pytest
import torch

import dtrrun
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
