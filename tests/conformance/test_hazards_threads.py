"""Threads and forked processes."""

import os
import sys
import threading
import time
import warnings

import pytest
import torch
from programs import assert_same, bits, chain, check_stress, mlp
from torch import nn

import dtrrun


def test_threads_train_in_one_session():
    """Four models in four threads, each with a generator of its own: as if one after the other."""

    def work(seed, results, together=None):
        own = torch.Generator().manual_seed(seed)
        model = mlp(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2, generator=own)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses = []
        if together:
            together.wait()
        for _ in range(3):
            x = torch.randn(64, 32, generator=own)
            mask = torch.rand(64, 32, generator=own) > 0.3
            loss = (model(x) * mask).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        results[seed] = bits([losses, model, optimizer])

    expected, found = {}, {}
    for seed in range(4):
        work(seed, expected)
    with dtrrun.budget(1, over_budget="warn", verify=True) as session:
        together = threading.Barrier(4)
        threads = [threading.Thread(target=work, args=(seed, found, together)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(record.locks for record in session.ledger.records.values()) == 0
        assert session.report()["evictions"] > 0
    assert session.report()["mismatches"] == []
    for seed in range(4):
        assert_same(expected[seed], found.get(seed, []), f"thread {seed}")


def test_threads_that_share_the_default_generator():
    """What each thread draws depends on the order; that it comes back with the same bits does not."""
    results = {}

    def work(name):
        kept = []
        for _ in range(40):
            x = torch.rand(64, 32)
            kept.append((x.tolist(), x, nn.functional.dropout(x, 0.5)))
        results[name] = kept

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with dtrrun.budget(1, over_budget="warn", verify=True) as session:
            threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(old)
    assert session.report()["evictions"] > 0
    assert session.report()["mismatches"] == []
    for kept in results.values():
        assert all(x.tolist() == seen for seen, x, _ in kept)


def test_a_tensor_made_in_one_thread_is_used_in_another():
    def program():
        made, used = [], []

        def make():
            made.extend(chain(torch.sin(torch.randn(64, 32))))

        def use():
            used.extend(x * 2 for x in made)

        for work in (make, use):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return made, used

    check_stress(program)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_has_every_tensor():
    model = mlp(3)
    x = torch.randn(64, 32)
    expected = bits([model(x), chain(x)])
    read, write = os.pipe()
    with dtrrun.budget(1, over_budget="warn") as session:
        y, kept = model(x), chain(x)
        assert session.report()["evicted_bytes"] > 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            code = 1
            try:
                mode = torch.utils._python_dispatch._get_current_dispatch_mode()
                same = bits([y, kept]) == expected == bits([model(x), chain(x)])
                loud = y.sum() * 2
                loud.backward()
                with dtrrun.budget(1, over_budget="warn"):
                    again = bits([model(x), chain(x)]) == expected
                code = 0 if same and again and mode is None and not session.running else 1
                os.write(write, repr((same, again, mode, session.running)).encode())
            except BaseException as error:
                os.write(write, repr(error).encode())
            finally:
                os._exit(code)
        os.close(write)
        _, status = os.waitpid(child, 0)
        told = os.read(read, 1000)
        assert bits([y, kept]) == expected
        (y.sum() * 2).backward()
        assert session.running
    assert status == 0, told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_data_loader_workers():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return torch.full((16,), float(index)).sin(), table[index] * 2

    table = torch.arange(32.0)[:, None].expand(32, 16).cos()

    def program():
        table[:] = torch.sin(torch.arange(32.0))[:, None]
        loader = torch.utils.data.DataLoader(Data(), 8, num_workers=2, shuffle=True)
        return [[x * 2, y.exp(), x @ y.t()] for x, y in loader]

    check_stress(program)


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_from_a_threads_first_operator_on_the_short_cut_is_not_taken():
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4) + 1
        in_a_thread(lambda: None)
        assert not session.careful.always
        in_a_thread(lambda: kept + 1)
        assert session.careful.always


def test_from_a_threads_first_access_on_the_short_cut_is_not_taken():
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4) + 1
        in_a_thread(kept.data_ptr)
        assert session.careful.always
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4) + 1
        storage = kept.untyped_storage()
        in_a_thread(lambda: storage.resize_(8))
        assert session.careful.always


def test_a_data_loaders_own_threads_touch_nothing():
    with dtrrun.budget("1GB") as session:
        data = torch.utils.data.TensorDataset(torch.randn(32, 8))
        for (x,) in torch.utils.data.DataLoader(data, 8, num_workers=1):
            x * 2
        assert not session.careful.always


def test_a_thread_waits_until_the_short_cut_is_left(monkeypatch):
    """The short cut has no lock: whoever is in it must be out of it before another touches the ledger."""
    met, order = threading.Event(), []
    with dtrrun.budget("1GB") as session:
        kept = torch.ones(4)
        for _ in range(3):
            kept + 1  # its signature is known: the short cut

        real = session.ledger.drain

        def drain():
            if not met.is_set():
                met.set()
                time.sleep(0.1)
                order.append("left")
            real()

        def other():
            met.wait()
            kept * 2
            order.append("touched")

        thread = threading.Thread(target=other)
        thread.start()
        session.ledger.dead.append(session.ledger.adopt(torch.ones(1).untyped_storage()))
        monkeypatch.setattr(session.ledger, "drain", drain)
        kept + 1
        thread.join()
    assert order == ["left", "touched"]


def test_a_thread_that_outlives_the_session():
    go_on, kept, results = threading.Event(), torch.ones(64), []

    def work():
        results.append(kept * 2)
        go_on.wait()
        results.append(results[0] * 2)

    thread = threading.Thread(target=work)
    with dtrrun.budget(1, over_budget="warn") as session:
        thread.start()
        while not results:
            time.sleep(0.001)
        operators = session.ledger.age
    go_on.set()
    thread.join()
    assert torch.equal(results[1], torch.full((64,), 4.0))
    assert session.ledger.age == operators > 0


def test_the_mode_comes_off_in_threads_too():
    """`mode_checks`: formulas that compute other bits under any mode, in a backward pass of a thread."""

    def work():
        torch.manual_seed(0)
        x = (torch.rand(7, 7) - 0.5).requires_grad_()
        hidden = [torch.tanh(x * 1.5) for _ in range(4)]
        (gradient,) = torch.autograd.grad(sum(one.prod(1).abs().sum() for one in hidden), [x])
        results.append(bits(gradient))

    results = []
    work()
    with dtrrun.budget(1, over_budget="warn"):
        in_a_thread(work)
    assert_same(results[0], results[1], "in a thread")
