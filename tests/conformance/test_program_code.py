"""No code of the program runs under our lock: it may wait for another thread, which may wait for its turn."""

import gc
import os
import threading

import pytest
import torch
from programs import assert_same, bits, chain, in_memory, outcome, plain
from torch import nn

import dtrrun
from dtrrun.core.observer import Observer
from dtrrun.runtime.dispatch import callbacks, turns

lock = threading.RLock()
called = []
"""Kinds of program code that have run, with whether this was under our lock."""
sessions = []


def note(kind):
    if sessions:
        called.append((kind, sessions[-1]._lock._is_owned()))


@torch.library.custom_op("dtrrun_program_code::locked", mutates_args=())
def locked(x: torch.Tensor) -> torch.Tensor:
    note("kernel")
    with lock:
        return torch.sin(x)


@locked.register_autograd
def _(ctx, gradient):
    return gradient * 1.0


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        note("forward")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        note("backward")
        return gradient * 2


class Resource:
    """Refers to itself, so that only a garbage collection frees it."""

    def __init__(self):
        self.me, self.buffer = self, torch.randn(64, 64)
        self.buffer.numpy()  # handed out: stays in memory

    def __del__(self):
        note("finalizer")
        with lock:
            pass


@pytest.fixture(autouse=True)
def evictable_results(monkeypatch):
    """The kernel reads state of the program, so its results would stay. Here it stands for one in C++."""
    monkeypatch.setattr(callbacks, "reading_of", lambda func, known: None)
    threshold = gc.get_threshold()
    gc.set_threshold(1_000_000)  # so that collections are dtrrun's own
    yield
    gc.set_threshold(*threshold)
    called.clear()


def training(steps=6):
    """Train, with code of the program wherever PyTorch calls some."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model[0].register_forward_hook(lambda *_: note("module hook"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: note("step hook"))
    losses = []
    for _ in range(steps):
        Resource()
        y = torch.randn(64, 64)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: note("pack") or x, lambda x: note("unpack") or x
        ):
            for layer in model:
                y = locked(torch.tanh(layer(y)))
        y = Own.apply(y)
        y.register_hook(lambda gradient: note("gradient hook"))
        loss = (y - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model


def inside(program, budget_bytes, **options):
    with dtrrun.budget(budget_bytes, **options) as session:
        sessions.append(session)
        try:
            result, _ = outcome(program)
            return result, session.report()
        finally:
            sessions.pop()


def test_no_code_of_the_program_runs_under_our_lock():
    expected = plain(training)
    with dtrrun.budget(None):
        pass  # functions that were registered before the first session run under our lock
    os.register_at_fork(before=lambda: note("fork"), after_in_parent=lambda: note("fork"))

    def program():
        result = training()
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return result

    result, report = inside(program, 320_000)
    assert_same(expected[: len(bits(result))], bits(result), "inside")
    replayed = {one["name"]: one["rematerializations"] for one in report["operators"]}
    assert replayed["dtrrun_program_code.locked"] > 0
    assert {kind for kind, _ in called} == {
        *("kernel", "forward", "backward", "finalizer", "fork"),
        *("module hook", "step hook", "pack", "unpack", "gradient hook"),
    }
    assert not {kind for kind, under_lock in called if under_lock}


def test_another_thread_holds_a_lock_of_the_program_while_it_waits_for_its_turn():
    """The kernel and the finalizer wait for that lock."""
    expected = plain(training)
    stop = threading.Event()

    def monitor():
        p = torch.eye(32)
        while not stop.wait(1e-4):
            with lock:
                p = torch.tanh(p @ p)
                p.mul_(0.5)

    thread = threading.Thread(target=monitor)

    def program():
        thread.start()
        try:
            return training()
        finally:
            stop.set()
            thread.join()

    result, report = inside(program, 340_000)
    assert_same(expected[: len(bits(result))], bits(result), "beside a thread")
    assert {"kernel", "finalizer"} <= {kind for kind, _ in called}
    assert report["rematerializations"] > 0


def test_a_replay_waits_for_a_thread_that_is_the_first_to_join():
    """Until then, the training thread takes no lock."""
    found = []

    def work():
        found.append(torch.ones(8).mul_(3).sum().item())

    @torch.library.custom_op("dtrrun_program_code::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        if sessions:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return torch.cos(x)

    with dtrrun.budget(1 << 20, over_budget="evict") as session:
        x = torch.sin(torch.arange(64.0))
        kept = chain(waits(x), 4)
        expected = bits(kept)
        session.set_budget(1)
        assert not in_memory(kept[0])
        session.set_budget(1 << 20)
        sessions.append(session)
        held = []
        looks = Observer()
        looks.finished = lambda call, outputs: held.append(session._lock._is_owned())
        session.ledger.observers.append(looks)
        try:
            assert bits([kept[-1] + 0]) == bits([kept[-1]])
            assert session.interposer._is_shared
            assert held
            assert all(held), "this thread has come back without the lock"
            assert bits(kept) == expected
            assert not session._lock._is_owned()
        finally:
            sessions.pop()
    assert found
    assert set(found) == {24.0}


def test_what_a_replay_reads_is_not_written_to_meanwhile():
    under_way, go_on = threading.Event(), threading.Event()

    @torch.library.custom_op("dtrrun_program_code::slow", mutates_args=())
    def slow(x: torch.Tensor) -> torch.Tensor:
        if sessions:
            under_way.set()
            go_on.wait(10)
        return x.expand(512, 64) + 1

    def write():
        under_way.wait(10)
        threading.Timer(0.05, go_on.set).start()
        weight.mul_(2)

    weight = torch.ones(64)  # small: when it changes, a copy is kept for what was computed from it
    with dtrrun.budget(1 << 20, over_budget="evict") as session:
        thread = threading.Thread(target=write)
        y = slow(weight)
        session.set_budget(1)
        assert not in_memory(y)
        session.set_budget(1 << 20)
        sessions.append(session)
        thread.start()
        z = y * 1
        sessions.pop()
        thread.join()
        assert (z == 2).all()
        assert (y == 2).all()
        assert (weight == 2).all()


def test_a_thread_that_waits_long_says_for_whom(monkeypatch, capfd):
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 0.05)
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4) + 1
        thread = threading.Thread(target=lambda: [kept + one for one in range(3)], name="worker")
        with session.callbacks.lock:
            thread.start()
            while not session.warnings:
                pass
        thread.join()
    [text] = session.warnings
    assert text.startswith(
        "thread 'worker' has waited 0 s for dtrrun, which thread 'MainThread' is using; 'MainThread' is at "
        f"{__file__}:"
    )
    assert capfd.readouterr().err.count("has waited") == 1
