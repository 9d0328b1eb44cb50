"""The program's hooks on what autograd saves, and on nodes of its graph.

They run as often as in a plain run, and find everything they read in memory.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from programs import assert_same, check, check_stress, plain, run_inside
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dtrrun

FORMULAS = {
    "prod": lambda x: x.prod(),
    "cumprod": lambda x: x.cumprod(0),
    "masked_fill": lambda x: x.masked_fill(x > 0, x.detach().sum()) * x.masked_fill(x > 0, x.sum()),
    "eigh": lambda x: torch.linalg.eigh(x + x.mT)[0],
    "in place": lambda x: (x * 1.0).masked_fill_(x > 0, 0.5),
}


def halved(tensor):
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


def doubled(tensor):
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()


class Counted:
    """Hooks that compute, draw random numbers, and read a tensor that only they have."""

    def __init__(self):
        self.packed = self.unpacked = 0
        self.noise = torch.sin(torch.randn(7, 7) * 3)

    def pack(self, tensor):
        self.packed += 1
        return halved(tensor)

    def unpack(self, tensor):
        self.unpacked += 1
        found = doubled(tensor)
        if found.dtype == torch.float32:
            found = found + (self.noise * torch.rand(())).sum() * 1e-3
        return found


def behind_hooks(function, hooks=None, *, shape=(7, 7), kept=4):
    def program():
        x = (torch.rand(*shape) - 0.5).requires_grad_()
        mine = Counted()
        with saved_tensors_hooks(mine.pack, mine.unpack) if hooks is None else hooks():
            losses = [function(torch.tanh(x * 1.5)).abs().sum() for _ in range(kept)]
        sum(losses).backward()
        return losses, x.grad, mine.packed, mine.unpacked

    return program


@pytest.mark.parametrize("name", FORMULAS)
def test_hooks_run_once_and_find_what_they_read(name):
    check_stress(behind_hooks(FORMULAS[name]))


@pytest.mark.parametrize("name", FORMULAS)
def test_tensors_kept_elsewhere(name):
    check_stress(behind_hooks(FORMULAS[name], save_on_cpu))


def recomputed(function, **options):
    """Checkpoint activations, each with a formula from FORMULAS inside.

    They stay small: where `tanh` saturates at ones, eigenvectors depend on each bit, and whether their
    gradient is refused depends on the processor.
    """

    def program():
        x = (torch.rand(7, 7) - 0.5).requires_grad_()
        weight = (torch.rand(7, 7) - 0.5).requires_grad_()

        def block(value, step):
            hidden = torch.tanh(value @ weight + step / 7)
            return torch.sin(function(hidden).abs().sum()) + hidden

        value = x
        for step in range(4):
            value = checkpoint(block, value, step, use_reentrant=False, **options)
        value.abs().sum().backward()
        return value, x.grad, weight.grad

    return program


@pytest.mark.parametrize("name", FORMULAS)
def test_within_checkpoints(name):
    check_stress(recomputed(FORMULAS[name]))


def test_within_selective_checkpoints():
    def keeps(context, operator, *args, **kwargs):
        chosen = operator in (torch.ops.aten.mm.default, torch.ops.aten.cumprod.default)
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    for name in ("cumprod", "masked_fill"):
        check_stress(
            recomputed(FORMULAS[name], context_fn=lambda: create_selective_checkpoint_contexts(keeps))
        )


def test_within_checkpoints_within_checkpoints():
    def program():
        x = (torch.rand(7, 7) - 0.5).requires_grad_()

        def inner(value):
            return torch.tanh(value).cumprod(0).masked_fill(value > 0.2, 0.5)

        def outer(value):
            return checkpoint(inner, checkpoint(inner, value, use_reentrant=False), use_reentrant=False).prod(
                1
            )

        losses = [checkpoint(outer, x * step, use_reentrant=False).sum() for step in range(4)]
        sum(losses).backward()
        return losses, x.grad

    check_stress(program)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5, 0.4])
def test_saved_in_fewer_bits_within_a_budget(share):
    def program():
        x, w = torch.randn(1536, 128), torch.randn(128, 512, requires_grad=True)
        unpacked = []

        def unpack(tensor):
            unpacked.append(tensor.shape)
            return tensor.float()

        losses = []
        for step in range(3):
            with saved_tensors_hooks(lambda tensor: tensor.bfloat16(), unpack):
                h = (x + step) @ w
                losses.append((h * h.sigmoid().cumprod(-1)).mean())
        sum(losses).backward()
        return losses, w.grad, len(unpacked)

    expected = plain(program)
    _, counted = run_inside(program, None)
    try:
        found, _ = run_inside(program, int(counted["peak_bytes"] * share))
    except dtrrun.BudgetError:
        return
    assert_same(expected, found, f"at {share:.0%} of the peak")


def test_hooks_entered_before_the_session():
    def program(inside):
        torch.manual_seed(3)
        x = (torch.rand(64, 64) - 0.5).requires_grad_()
        mine = Counted()
        with saved_tensors_hooks(mine.pack, mine.unpack):
            with inside:
                losses = [torch.tanh(x * 1.5).cumprod(0).sum() for _ in range(4)]
                sum(losses).backward()
            after = (x.cumprod(1) * 2).sum()
        after.backward()
        return losses, x.grad, mine.packed, mine.unpacked

    assert_same(
        plain(lambda: program(nullcontext())),
        plain(lambda: program(dtrrun.budget(1, over_budget="evict"))),
        "hooks from before the session",
    )


def test_hooks_on_one_saved_tensor():
    def program():
        x = (torch.rand(7, 7) - 0.5).requires_grad_()
        losses, unpacked = [], []
        for step in range(4):
            product = torch.tanh(x * step).cumprod(0)
            extra = torch.sin(x.detach() * step)

            def unpack(tensor, extra=extra):
                unpacked.append(0)
                return tensor.float() + extra

            product.grad_fn._raw_saved_self.register_hooks(halved, unpack)
            losses.append(product.sum())
        sum(losses).backward()
        return losses, x.grad, len(unpacked)

    check_stress(program)


def hooked(register):
    """Register a hook on or near the formula's node that reads what may be evicted."""

    def program():
        x = torch.rand(64, 64).requires_grad_()
        extra = [torch.sin(x.detach() * step) for step in range(5)]
        seen = []
        losses = []
        for step in range(4):
            hidden = torch.tanh(x * (step + 1))
            filled = hidden.masked_fill(x > 0.5, 0.25)

            def hook(*gradients, step=step):
                seen.append(extra[step].sum() + extra[step + 1].exp().mean())

            register(hidden, filled, hook)
            losses.append((filled * 2).sum())
        sum(losses).backward()
        return losses, x.grad, seen

    return program


HOOKS = {
    "node": lambda hidden, filled, hook: filled.grad_fn.register_hook(hook),
    "node twice": lambda hidden, filled, hook: [filled.grad_fn.register_hook(hook) for _ in range(2)],
    "node before": lambda hidden, filled, hook: filled.grad_fn.register_prehook(hook),
    "tensor": lambda hidden, filled, hook: filled.register_hook(hook),
    "input": lambda hidden, filled, hook: hidden.register_hook(hook),
    "late": lambda hidden, filled, hook: filled.register_hook(
        lambda gradient: [filled.grad_fn.register_hook(hook), None][1]
    ),
    "late before": lambda hidden, filled, hook: filled.register_hook(
        lambda gradient: [filled.grad_fn.register_prehook(hook), None][1]
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_about_such_a_node_that_read_what_is_evicted(name):
    check(hooked(HOOKS[name]))


def test_hooks_keep_their_order_and_can_be_removed():
    def program():
        x = torch.rand(7, 7).requires_grad_()
        order = []
        filled = torch.tanh(x).masked_fill(x > 0.5, 0.25)
        first = filled.grad_fn.register_hook(lambda *_: order.append("first"))
        filled.grad_fn.register_hook(lambda *_: order.append("second"))
        filled.sum().backward(retain_graph=True)
        first.remove()
        filled.sum().backward()
        return order, [torch.sin(x.detach() * step) for step in range(4)]

    check_stress(program)


def test_a_hook_that_raises_leaves_the_session_usable():
    def program():
        x = (torch.rand(64, 64) - 0.5).requires_grad_()
        told = []

        def refuse(tensor):
            raise ValueError("no")

        for place in ("unpack", "node", "pack"):
            with saved_tensors_hooks(
                refuse if place == "pack" else halved, refuse if place == "unpack" else doubled
            ):
                try:
                    product = torch.tanh(x).cumprod(0)
                    if place == "node":
                        product.grad_fn.register_hook(lambda *_: refuse(None))
                    product.sum().backward()
                except ValueError as error:
                    told.append(str(error))
        rows = [torch.sin(x.detach() * step) for step in range(4)]
        x.cumprod(0).sum().backward()
        return told, rows, x.grad

    check(program)


def test_a_backward_pass_within_a_hook():
    def program():
        x = (torch.rand(32, 32) - 0.5).requires_grad_()
        inner = torch.rand(32, 32).requires_grad_()

        def unpack(tensor):
            with torch.enable_grad():
                product = torch.tanh(inner * 2).cumprod(0).masked_fill(inner > 0.5, 0.1).prod(0)
                total = product.sum()
            total.backward()
            return tensor.float()

        with saved_tensors_hooks(lambda tensor: tensor.bfloat16(), unpack):
            losses = [torch.tanh(x * step).cumprod(1).sum() for step in range(4)]
        sum(losses).backward()
        return losses, x.grad, inner.grad

    check_stress(program)


def test_gradients_of_gradients_behind_hooks():
    def program():
        x = (torch.rand(7, 7) - 0.5).requires_grad_()
        mine = Counted()
        with saved_tensors_hooks(mine.pack, mine.unpack):
            losses = [torch.tanh(x * 1.5).cumprod(0).prod(1).sum() for _ in range(3)]
            (gradient,) = torch.autograd.grad(sum(losses), [x], create_graph=True)
            again = torch.autograd.grad(gradient.abs().sum(), [x])
        return losses, gradient, again, mine.packed, mine.unpacked

    check_stress(program)


def test_anomaly_detection():
    def program():
        x = (torch.rand(32, 32) - 0.5).requires_grad_()
        with torch.autograd.set_detect_anomaly(True):
            losses = [torch.tanh(x * step).cumprod(1).masked_fill(x > 0.3, 0.1).sum() for step in range(4)]
            sum(losses).backward()
        return losses, x.grad

    check_stress(program)
