"""Tensors of another size at each step: what dtrrun knows of each size takes bounded memory."""

import tracemalloc

import pytest
import torch

import dtrrun
from dtrrun.runtime.dispatch import signatures


def step(length):
    x = torch.ones(length, 3)
    return (x.mul(2) @ torch.ones(3, 5)).softmax(0).sum()


def run(lengths):
    with dtrrun.budget("100MB", "cpu") as session:
        known = session.callbacks.signatures
        largest = 0
        for length in lengths:
            step(length)
            largest = max(largest, known.nbytes)
        return largest, len(known.all())


def test_what_is_known_of_sizes_is_bounded_by_its_bytes(monkeypatch):
    monkeypatch.setattr(signatures, "LIMIT_BYTES", 200_000)
    largest, count = run(range(100, 400))
    assert 150_000 < largest < 210_000
    assert count < 600  # of 1,500


def test_the_bytes_are_about_right():
    run(range(10, 20))
    with dtrrun.budget("100MB", "cpu") as session:
        step(10)
        tracemalloc.start()
        before, counted = tracemalloc.get_traced_memory()[0], session.callbacks.signatures.nbytes
        for length in range(100, 1100):
            step(length)
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert session.callbacks.signatures.nbytes - counted == pytest.approx(taken, rel=0.5)
