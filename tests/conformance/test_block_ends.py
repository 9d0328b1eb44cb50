"""How a block of `dtrrun.budget` ends: within the budget after an error, and always with the right values."""

import gc
import os
import time
import traceback
import weakref
from contextlib import contextmanager

import pytest
import torch

import dtrrun
from dtrrun.runtime.patches import registry

ROWS, WIDTH, LAYERS = 1000, 64, 20
BYTES = ROWS * WIDTH * 4
BUDGET = 6 * BYTES + LAYERS * WIDTH * WIDTH * 4


class Failed(Exception):
    pass


@pytest.fixture(autouse=True)
def nothing_evicted_before():
    """Bring back what an earlier test's error may still refer to: later sessions would look after it."""
    with dtrrun.budget(None, "cpu"):
        pass


def weights():
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH) / 8 for _ in range(LAYERS)]


def activations(matrices, kept):
    """Fill `kept` with the results of all layers, which take more than three times the budget."""
    y = torch.arange(ROWS * WIDTH * 1.0).reshape(ROWS, WIDTH) / (ROWS * WIDTH)
    for matrix in matrices:
        y = (y @ matrix).tanh()
        kept.append(y)
    return kept


def fail(matrices):
    kept = []
    activations(matrices, kept)
    raise Failed


@contextmanager
def failing(budget=BUDGET):
    with dtrrun.budget(budget, "cpu", quiet=True) as session:
        yield session
        assert session.ledger.evicted_bytes > budget
        raise Failed


def frames_of(error):
    return [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]


def let_the_session_end():
    for _ in range(3):
        time.sleep(0.01)  # what operators look at now and then, they look at every 5 ms
        torch.ones(1) + 1  # an operator notices that nothing is evicted any more


def test_the_report_of_a_block_that_has_ended_is_about_its_budget():
    with dtrrun.budget(BUDGET, "cpu") as session:
        kept, matrices = [], weights()
        activations(matrices, kept)
        inside = session.report()
    report = session.report()
    assert report["evicted_bytes"] == 0 < inside["evicted_bytes"]  # all is back, without a budget
    for name in ("budget_bytes", "peak_bytes", "sufficient_bytes"):
        assert report[name] == inside[name]
    assert report["peak_bytes"] <= BUDGET == report["budget_bytes"]


def test_an_error_that_leaves_a_block_brings_back_no_more_than_fits():
    with pytest.raises(Failed), dtrrun.budget(BUDGET, "cpu") as session:
        fail(weights())
    report = session.report()
    assert report["peak_bytes"] <= BUDGET == report["budget_bytes"]
    assert session.ledger.resident_bytes <= BUDGET
    assert report["warnings"] == []


def test_the_session_is_over_once_nothing_refers_to_what_is_evicted():
    try:
        with dtrrun.budget(BUDGET, "cpu") as session:
            fail(weights())
    except Failed:
        assert session.left
    let_the_session_end()
    assert not session.running
    assert registry.installed() == []


def test_a_debugger_finds_the_values_and_the_program_goes_on_without_a_budget():
    """What the traceback refers to comes back when it is read, even if the weights have changed meanwhile."""
    expected, matrices = activations(weights(), []), weights()
    with pytest.raises(Failed) as caught, dtrrun.budget(BUDGET, "cpu"):
        fail(matrices)
    for matrix in matrices:
        matrix.zero_()  # by an operator, without a budget
    assert torch.ones(4 * BUDGET // 4).sum().item() == BUDGET  # far more than the budget
    (kept,) = [names["kept"] for names in frames_of(caught.value) if "matrices" in names and "kept" in names]
    for one, other in zip(reversed(kept), reversed(expected), strict=True):
        assert torch.equal(one, other)
    let_the_session_end()


def test_the_next_block_begins_within_its_budget_and_what_was_given_up_raises_an_error():
    kept, matrices = [], weights()
    with pytest.raises(Failed), failing() as first:
        activations(matrices, kept)
    with dtrrun.budget(BUDGET, "cpu", quiet=True) as session:
        found = []
        for one in kept:
            try:
                found.append(one.sum().item())
            except dtrrun.LostError:
                found.append(None)
        assert session.report()["peak_bytes"] <= BUDGET
    assert not first.running
    assert None in found
    expected = activations(weights(), [])
    assert all(value in (None, one.sum().item()) for value, one in zip(found, expected, strict=True))
    assert any("have no data any more" in one["text"] for one in first.report()["warnings"])


def test_a_kept_budget_error_keeps_what_it_refers_to_evicted():
    errors = []
    for _ in range(2):
        try:
            with dtrrun.budget(BUDGET, "cpu", quiet=True) as session:
                kept = activations(weights(), [])
                torch.cat(kept)
        except dtrrun.BudgetError as error:
            errors.append(error)
        del kept
        assert session.report()["peak_bytes"] <= BUDGET
        assert session.ledger.resident_bytes <= BUDGET
    assert "aten.cat" in str(errors[0])
    errors.clear()
    gc.collect()
    let_the_session_end()


def test_the_end_of_a_block_without_an_error_brings_everything_back_and_says_by_how_much():
    kept = []
    with dtrrun.budget(BUDGET, "cpu", quiet=True) as session:
        activations(weights(), kept)
    report = session.report()
    assert report["peak_bytes"] <= BUDGET
    (warning,) = report["warnings"]
    assert "above the budget" in warning["text"]
    assert all(map(torch.equal, kept, activations(weights(), [])))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")
def test_blocks_leave_no_file_open():
    """Not even until the next garbage collection: a process may have a thousand only."""
    open_files, was_on = [], gc.isenabled()
    gc.disable()
    try:
        for _ in range(12):
            with dtrrun.budget("64MB"):
                torch.ones(8).sum()
            open_files.append(len(os.listdir("/proc/self/fd")))
    finally:
        if was_on:
            gc.enable()
    assert open_files[-1] <= open_files[1]


def test_an_ended_session_is_let_go_of():
    """Nothing keeps it, such as the extension, so its graph goes, too."""
    ended, nodes = [], []
    for size in (None, 1, None):
        layer = torch.nn.Linear(WIDTH, WIDTH)
        with dtrrun.budget(size, "cpu", over_budget="evict") as session:
            gc.collect()
            assert [one for one in ended if one() is not None] == []
            nodes.append(sum(session._native.living()))
            layer(torch.ones(4, WIDTH)).sum().backward()
            ended.append(weakref.ref(session))
        del session
    assert nodes[1] == nodes[2]
