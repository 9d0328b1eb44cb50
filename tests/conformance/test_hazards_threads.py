"""Threads and forked processes."""

import os
import sys
import threading
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


def test_from_the_first_thread_on_the_short_cut_is_not_taken():
    with dtrrun.budget("1GB") as session:
        torch.ones(4) + 1
        assert not session.careful.always
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        assert session.careful.always
