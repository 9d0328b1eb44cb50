"""Exceptions in hooks and custom functions, and finalizers that use torch while something is recomputed."""

import contextlib
import gc

import pytest
import torch
from faults import check_accounts
from programs import assert_same, batch, mlp, outcome, plain
from torch import nn

import dtrrun
from tests.care import budget
from tests.kernels import use_replays


class Fault(Exception):
    pass


class Failing:
    """A hook that raises once, at its third call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 3:
            raise Fault
        return None


def on_tensors(model, hook):
    for module in model:
        module.register_forward_hook(lambda m, i, y: y.register_hook(hook) and None)


def on_saved(model, hook):
    def unpack(x):
        hook()
        return x

    for module in model:
        forward = module.forward

        def hooked(x, forward=forward):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 1.0, unpack):
                return forward(x)

        module.forward = hooked


HOOKS = {
    "tensor": on_tensors,
    "module forward": lambda model, hook: [m.register_forward_hook(hook) for m in model],
    "module forward pre": lambda model, hook: [m.register_forward_pre_hook(hook) for m in model],
    "module backward": lambda model, hook: [m.register_full_backward_hook(hook) for m in model],
    "gradient": lambda model, hook: [p.register_hook(hook) for p in model.parameters()],
    "accumulated": lambda model, hook: [
        p.register_post_accumulate_grad_hook(hook) for p in model.parameters()
    ],
    "saved tensors": on_saved,
}


def check_faults(program, budget_bytes, failures):
    expected = plain(program)
    for careful in (False, True):
        failed.clear()
        with budget(budget_bytes, over_budget="evict", careful=careful, verify=True) as session:
            _, found = outcome(program)
            check_accounts(session)
            assert session.report()["evictions"] > 0
        assert_same(expected, found, f"careful={careful}")
        assert session.report()["mismatches"] == []
        assert len(failed) == failures


failed = []


@contextlib.contextmanager
def caught():
    try:
        yield
    except Fault:
        failed.append(True)


@pytest.mark.parametrize("install", HOOKS.values(), ids=HOOKS.keys())
def test_hooks_that_raise(install):
    def program():
        model = mlp(5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        install(model, Failing())
        kept = []
        for _ in range(3):
            x, y = batch()
            with caught():
                hidden = model(x)
                kept.append(hidden)
                optimizer.zero_grad()
                nn.functional.mse_loss(hidden, y).backward()
            with torch.no_grad():
                kept += [hidden * 2 if kept else x, x.sin()]
            optimizer.step()
        return kept, model, optimizer

    check_faults(program, 1, 1)


class Doubled(torch.autograd.Function):
    """Raises in a pass when told to; by then its backward has read and written memory."""

    raises = ""

    @staticmethod
    def forward(ctx, x):
        y = torch.from_numpy(x.numpy() * 2)  # native code hidden from operators
        ctx.save_for_backward(x, y)
        if Doubled.raises == "forward":
            raise Fault
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        out = torch.from_numpy(grad.numpy() + 0 * x.detach().numpy() * y.detach().numpy())
        if Doubled.raises == "backward":
            raise Fault
        return out * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_custom_functions_that_raise(where):
    def program():
        model = mlp(4)
        kept = []
        for step in range(4):
            x, _ = batch()
            hidden = model[:4](x)
            Doubled.raises = where if step % 2 else ""
            with caught():
                made = Doubled.apply(hidden)
                kept.append(made)
                model[4:](made).square().mean().backward()
            kept += [hidden, hidden.exp()]
        Doubled.raises = ""
        return kept, model

    check_faults(program, 1, 2)


def test_finalizers_that_use_torch_in_the_middle_of_a_rematerialization(monkeypatch):
    """They run unseen there, so what they read must be in memory: here it is pinned."""
    waiting, spent = [], []

    class Finalized:
        def __init__(self, tensor):
            self.tensor, self.cycle = tensor, self

        def __del__(self):
            with torch.no_grad():
                spent.append(float((self.tensor.sin() * 2).sum()))

    def collecting(_name, compute):
        if waiting:
            Finalized(waiting.pop())
            gc.collect()
        compute()

    def program(finalize=lambda one: None):
        x = torch.randn(64, 32)
        kept = [x]
        for step in range(12):
            kept.append(torch.sin(kept[-1] * 1.1 + step))
            finalize(torch.cos(kept[-1]))
        return [[one * 2 for one in reversed(kept)], kept]

    def finalize(one):
        session.pin(one)
        waiting.append(one)

    use_replays(monkeypatch, collecting)
    gc.collect()
    gc.freeze()
    try:
        expected = plain(program)
        with dtrrun.budget(40_000, over_budget="evict", verify=True) as session:
            (_, kept), found = outcome(lambda: program(finalize))
            check_accounts(session)
            assert session.report()["rematerializations"] > 12
    finally:
        gc.unfreeze()
    assert_same(expected, found, "with finalizers in between")
    assert session.report()["mismatches"] == []
    assert sorted(spent) == sorted(float((one.cos().sin() * 2).sum()) for one in kept[1:])
