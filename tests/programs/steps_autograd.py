"""Steps that differentiate: leaves, backward passes, hooks, checkpoints, modules, optimizers, grad modes."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed

from tests.programs.language import PLACES, Body, Step, World, fit, matrix, step
from tests.programs.steps_tensors import UNARY

LEAVES = 6


def differentiable(w: World, place: int) -> torch.Tensor:
    """Return the place-th newest tensor that leads to a leaf; make one if there is none."""
    found = [x for x in w.tensors if x.requires_grad and x.numel()]
    if not found:
        leaf(w, place, "tensor")
        found = [torch.sin(w.tensors[-1])]
        w.keep(*found)
    return found[-1 - place % len(found)]


def scalar(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x).sum() if x.is_complex() else (x * 0.5).sum()


@step(PLACES, ("tensor", "parameter", "made_inside", "requires_grad_"))
def leaf(w: World, a: int, how: str) -> None:
    if torch.is_inference_mode_enabled():
        return  # PyTorch itself loses the gradients of some operators of such a leaf under a dispatch mode
    x = w.real(a).detach().clone()
    if how == "parameter":
        x = nn.Parameter(x)
    elif how == "made_inside":
        x = torch.randn(12, 16, requires_grad=True)
    else:
        x.requires_grad_()
    w.leaves.append(x)
    del w.leaves[:-LEAVES]
    w.keep(x)


@step(PLACES, (False, True))
def backward(w: World, a: int, retain: bool) -> None:
    scalar(differentiable(w, a)).backward(retain_graph=retain)


@step(PLACES, range(2, 4))
def backward_again(w: World, a: int, times: int) -> None:
    loss = scalar(differentiable(w, a).square())
    for last in range(times - 1, -1, -1):
        loss.backward(retain_graph=last > 0)


@step(PLACES, ("grad", "double", "backward", "hessian_vector"))
def higher(w: World, a: int, how: str) -> None:
    """Compute gradients that have gradients."""
    x = differentiable(w, a)
    source = next((one for one in reversed(w.leaves) if one.requires_grad), x)
    loss = scalar(torch.sin(x) * x)
    if how == "backward":
        loss.backward(create_graph=True)
        w.keep(*(one.grad.sin() for one in w.leaves if one.grad is not None))
        return
    (first,) = torch.autograd.grad(loss, source, create_graph=True, allow_unused=True)
    if first is None:
        return
    w.keep(first)
    if how != "grad" and first.requires_grad:
        product = (first * first).sum() if how == "double" else (first * first.detach().sin()).sum()
        w.keep(*(g for g in torch.autograd.grad(product, source, allow_unused=True) if g is not None))


@step(PLACES, ("halve", "in_place", "keep", "retain_grad", "after", "node"))
def hook(w: World, a: int, how: str) -> None:
    """Register hooks on a tensor that run in a later backward pass."""
    x = differentiable(w, a)
    if how == "halve":
        x.register_hook(lambda gradient: gradient * 0.5)
    elif how == "in_place":
        x.register_hook(lambda gradient: gradient.mul_(0.25) and None)
    elif how == "keep":
        x.register_hook(lambda gradient: w.keep(*filter(torch.is_tensor, [gradient])))
    elif how == "retain_grad":
        x.retain_grad()
    elif how == "after":
        x.register_post_accumulate_grad_hook(lambda one: one.data.sub_(one.grad, alpha=0.1))
    elif x.grad_fn is not None:
        x.grad_fn.register_hook(lambda given, taken: w.seen.append(len(given)))


@step(PLACES, (True, False), ("sin", "tanh", "dropout", "gelu", "square"), ("sin", "dropout", "sigmoid"))
def checkpoint(w: World, a: int, reentrant: bool, first: str, second: str) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return UNARY[second](UNARY[first](x) * 1.5) + x

    w.keep(checkpointed(body, differentiable(w, a), use_reentrant=reentrant))


def pack_list(x: torch.Tensor) -> Any:
    return x.tolist(), x.dtype, x.shape


def unpack_list(packed: Any) -> torch.Tensor:
    values, dtype, shape = packed
    return torch.tensor(values, dtype=dtype).reshape(shape)


class Cube(torch.autograd.Function):
    """Writes its own gradient, and accesses memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _x, y = ctx.saved_tensors
        return gradient * y * 3


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clone())
        return x.mul_(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient.mul_(2).mul(x)


@step(PLACES, ("cube", "in_place"))
def function(w: World, a: int, name: str) -> None:
    x = differentiable(w, a)
    w.keep(Cube.apply(x) if name == "cube" else InPlace.apply(x * 1.5))


CONTEXTS: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved_as_lists": lambda: torch.autograd.graph.saved_tensors_hooks(pack_list, unpack_list),
    "saved_twice": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2),
    "saved_on_cpu": torch.autograd.graph.save_on_cpu,
    "nothing": nullcontext,
}


@step(list(CONTEXTS), Body)
def within(w: World, name: str, body: tuple[Step, ...]) -> None:
    with CONTEXTS[name]():
        w.run(body)


MODULES: dict[str, Any] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)),
    "batch_norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
    "batch_norm_cumulative": lambda: nn.BatchNorm1d(8, momentum=None, affine=False),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU(), nn.AlphaDropout(0.2)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Softmax(-1)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3, padding=1), nn.MaxPool1d(2), nn.Flatten()
    ),
    "lstm": lambda: Recurrent(nn.LSTM(8, 8)),
    "gru": lambda: Recurrent(nn.GRU(8, 8)),
    "attention": lambda: Attention(),
    "held": lambda: nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Sigmoid()
    ),
    "spectral": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
}


class Recurrent(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:3])[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:5], x[:5], x[:5], need_weights=False)[0]


def module_of(w: World, name: str) -> nn.Module:
    if name not in w.modules:
        with torch.inference_mode(False):
            w.modules[name] = MODULES[name]()
    return w.modules[name]


@step(PLACES, list(MODULES))
def module(w: World, a: int, name: str) -> None:
    w.keep(module_of(w, name)(matrix(w.real(a))))


@step(list(MODULES), ("eval", "train", "forward_hook", "backward_hook", "pre_hook", "freeze", "double"))
def change_module(w: World, name: str, how: str) -> None:
    found = module_of(w, name)
    if how in ("eval", "train"):
        found.train(how == "train")
    elif how == "forward_hook":
        found.register_forward_hook(lambda _module, _args, result: result * 1.25)
    elif how == "backward_hook":
        found.register_full_backward_hook(
            lambda _module, taken, given: w.keep(*filter(torch.is_tensor, given))
        )
    elif how == "pre_hook":
        found.register_forward_pre_hook(lambda _module, args: (args[0].sin(),))
    elif how == "freeze":
        found.requires_grad_(not next(found.parameters(), torch.zeros(0)).requires_grad)
    elif not torch.is_inference_mode_enabled():
        found.double().float()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "adam_foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "adam_fused": lambda ps: torch.optim.Adam(ps, 0.01, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, centered=True),
}


@step(list(OPTIMIZERS), (True, False))
def optimize(w: World, name: str, to_none: bool) -> None:
    """Make an optimizer step over all parameters that existed at its first step."""
    if name not in w.optimizers:
        found = [p for m in w.modules.values() for p in m.parameters()]
        found += [one for one in w.leaves if one.is_leaf and one.requires_grad]
        w.optimizers[name] = OPTIMIZERS[name](list(dict.fromkeys(found)))
    w.optimizers[name].step()
    w.optimizers[name].zero_grad(set_to_none=to_none)


@step(PLACES, list(MODULES), list(OPTIMIZERS))
def train(w: World, a: int, name: str, optimizer: str) -> None:
    """Make a whole training step."""
    inputs = matrix(w.real(a)).detach()
    result = module_of(w, name)(inputs)
    loss = nn.functional.mse_loss(result, fit(inputs, result))
    if loss.requires_grad:
        loss.backward()
    optimize(w, optimizer, True)
    w.keep(loss)


HELD_OVER = ("sgd", "foreach", "no_grad", "data", "numpy", "statistics", "fails")


@step(PLACES, HELD_OVER, (False, True))
def hold_over_change(w: World, a: int, how: str, backward: bool) -> None:
    """Hold a graph that takes much more than its weights while these change."""
    module = module_of(w, "held").eval()
    parameters = list(module.parameters())
    with torch.enable_grad():
        x = inputs = matrix(w.real(a)).detach().repeat(16, 1)
        made = [x := layer(x) for layer in module]
    if how == "statistics":
        module.train()(inputs * 2)
    elif how == "data":
        parameters[0].data.mul_(0.75)
    elif how == "numpy":
        parameters[0].detach().numpy()[0] = 0.5
    with torch.no_grad():
        if how in ("sgd", "foreach"):
            for one in parameters:
                one.grad = torch.sin(one)
            torch.optim.SGD(parameters, 0.125, momentum=0.5, foreach=how == "foreach").step()
        elif how == "no_grad":
            for one in parameters:
                one.mul_(0.5).add_(0.125)
        elif how == "fails":
            with suppress(RuntimeError):
                parameters[0].add_(torch.ones(3))
    w.keep(made[1], made[-1])
    if backward:
        made[1].square().sum().backward(retain_graph=True)
        with suppress(RuntimeError):  # what it needs has changed
            made[-1].sum().backward()


@step(PLACES, ("data_add_", "data_new", "no_grad", "grad_scale", "grad_none", "clip"))
def change_leaf(w: World, a: int, how: str) -> None:
    """Change a leaf, or its gradient, behind autograd's back."""
    found = [*w.leaves, *(p for m in w.modules.values() for p in m.parameters())]
    if not found:
        return
    one = found[-1 - a % len(found)]
    if how == "data_add_":
        one.data.add_(0.125)
    elif how == "data_new" and not torch.is_inference_mode_enabled():
        one.data = torch.sin(one.data)
    elif how == "no_grad":
        with torch.no_grad():
            one.mul_(0.5)
    elif how == "grad_none":
        one.grad = None
    elif how == "clip":
        w.keep(nn.utils.clip_grad_norm_(found, 0.5))
    elif how == "grad_scale" and one.grad is not None:
        one.grad.data.mul_(0.5)
