"""Steps that write to memory: in place, through views, `out=`, `_foreach`, `.data`, slice assignments."""

from __future__ import annotations

import torch

from tests.programs.language import PLACES, World, fit, step
from tests.programs.steps_tensors import VIEWS

IN_PLACE = {
    "add_": lambda x, y: x.add_(y, alpha=1),
    "mul_": lambda x, y: x.mul_(2),
    "sin_": lambda x, y: x.sin_(),
    "clamp_": lambda x, y: x.clamp_(-1, 1),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(2),
    "copy_": lambda x, y: x.copy_(y),
    "relu_": lambda x, y: x.relu_(),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=1),
    "self": lambda x, y: x.add_(x),
    "overlap": lambda x, y: x[1:].sub_(x[:-1].clone()),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 1),
    "t_": lambda x, y: x.t_(),
    "unsqueeze_": lambda x, y: x.unsqueeze_(0),
    "bernoulli_": lambda x, y: x.bernoulli_(0.5),
    "normal_": lambda x, y: x.normal_(),
    "random_": lambda x, y: x.random_(0, 5),
    "fill_diagonal_": lambda x, y: x.fill_diagonal_(1),
    "cumsum_": lambda x, y: x.cumsum_(0),
    "neg_": lambda x, y: x.neg_(),
    "detach_": lambda x, y: x.detach_(),
    "operator": lambda x, y: x.__iadd__(y),
}

ASSIGN = {
    "tail": lambda x, y: x.__setitem__(slice(1, None), y[1:]),
    "row": lambda x, y: x.__setitem__(0, y[-1]),
    "column": lambda x, y: x.__setitem__((..., 0), 1),
    "columns": lambda x, y: x[..., ::2].mul_(3),
    "mask": lambda x, y: x.__setitem__(y > 0, 0),
    "mask_values": lambda x, y: x.__setitem__(y > 0, y[y > 0]),
    "ellipsis": lambda x, y: x.__setitem__(..., y),
    "index": lambda x, y: x.__setitem__(torch.tensor([0, -1]), y[:2]),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([0, 1, 0]),), y[:3], accumulate=True),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([1, 0]), y[:2]),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([1, 0]), y[:2]),
    "scatter_": lambda x, y: x.scatter_(0, torch.zeros_like(x[:1], dtype=torch.long), y),
    "scatter_add_": lambda x, y: x.scatter_add_(0, torch.ones_like(x[:2], dtype=torch.long), y),
    "masked_scatter_": lambda x, y: x.masked_scatter_(y > 0, y.clone()),
    "put_": lambda x, y: x.put_(torch.tensor([0, 3]), y.reshape(-1)[:2]),
    "diagonal": lambda x, y: x.diagonal().fill_(0.5),
    "flat": lambda x, y: x.view(-1)[::3].zero_(),
}


def writable(x: torch.Tensor) -> torch.Tensor:
    return x.detach() if x.is_leaf and x.requires_grad else x


@step(PLACES, PLACES, list(IN_PLACE))
def in_place(w: World, a: int, b: int, name: str) -> None:
    x = writable(w.pick(a))
    IN_PLACE[name](x, fit(w.pick(b), x))


@step(PLACES, PLACES, sorted(VIEWS.keys() - {"expand"}), sorted(IN_PLACE.keys() - {"detach_"}))
def through_view(w: World, a: int, b: int, view: str, name: str) -> None:
    x = VIEWS[view](writable(w.pick(a)))
    IN_PLACE[name](x, fit(w.pick(b), x))


@step(PLACES, PLACES, list(ASSIGN))
def assign(w: World, a: int, b: int, name: str) -> None:
    x = writable(w.pick(a))
    ASSIGN[name](x, fit(w.pick(b), x))


@step(PLACES, PLACES, PLACES, ("itself", "fresh", "grown", "part", "two"))
def out(w: World, a: int, b: int, c: int, where: str) -> None:
    with torch.no_grad():
        x = w.real(a).detach()
        y = fit(w.pick(b), x)
        if where == "itself":
            torch.add(x, y, out=writable(fit(w.pick(c), x)))
        elif where == "fresh":
            w.keep(torch.mul(x, y, out=torch.empty_like(x)))
        elif where == "grown":
            w.keep(torch.cat([x, y], out=torch.empty(0, dtype=x.dtype)))
        elif where == "part":
            half = torch.zeros((2, *x.shape), dtype=x.dtype)
            torch.sin(y, out=half[1])
            w.keep(half)
        else:
            values, places = torch.empty(0, dtype=x.dtype), torch.empty(0, dtype=torch.long)
            torch.max(x, -1, out=(values, places))
            w.keep(values, places)


@step(PLACES, ("add", "mul_", "copy_", "lerp_", "addcdiv_", "norm", "zero_", "sqrt", "self_"))
def foreach(w: World, a: int, name: str) -> None:
    """Run a list operator over three of the program's tensors."""
    with torch.no_grad():
        many = [w.real(a + place).detach() for place in range(3)]
        others = [fit(w.pick(a), x) + 1 for x in many]
        if name == "add":
            w.keep(*torch._foreach_add(many, others))
        elif name == "mul_":
            torch._foreach_mul_(many, 0.5)
        elif name == "copy_":
            torch._foreach_copy_(many, others)
        elif name == "lerp_":
            torch._foreach_lerp_(many, others, 0.1)
        elif name == "addcdiv_":
            torch._foreach_addcdiv_(many, others, others, 0.1)
        elif name == "norm":
            w.keep(*torch._foreach_norm(many))
        elif name == "zero_":
            torch._foreach_zero_(others)
            w.keep(*others)
        elif name == "sqrt":
            w.keep(*torch._foreach_sqrt([x.abs() for x in others]))
        else:
            torch._foreach_sub_(many, many)


@step(PLACES, ("lerp_", "mul_", "all", "with_new", "read"))
def average(w: World, a: int, how: str) -> None:
    """Update state that the program keeps, by operators on lists, or compute something from it."""
    with torch.no_grad():
        inference = torch.is_inference_mode_enabled()
        if not w.averages or (
            w.averages[0].is_inference() and not inference
        ):  # docs/limits.md: refused half-way
            w.averages = [torch.tensor([[0.5 + place] * 16] * 12) for place in range(3)]
        new = [fit(w.real(a + place), one) * 1 for place, one in enumerate(w.averages)]
        if how in ("lerp_", "all"):
            torch._foreach_lerp_(w.averages, new, 0.125)
        if how in ("mul_", "all"):
            torch._foreach_mul_(w.averages, 0.75)
        if how == "with_new":
            torch._foreach_add_([*w.averages, *new], 1.0)
            w.keep(*new)
        if how in ("read", "all"):
            w.keep(w.averages[a % 3] * 2, w.averages[0].sin())


@step(PLACES, PLACES, ("data", "set_", "resize_", "swap", "share"))
def rebind(w: World, a: int, b: int, how: str) -> None:
    """Change a tensor's storage, or how much of it the tensor uses."""
    x, y = w.pick(a), w.pick(b)
    if y.is_inference() or torch.is_inference_mode_enabled():
        return  # PyTorch would make tensors that it can neither count nor compute with
    if how == "data":
        x.data = y.detach().clone()
    elif how == "set_":
        if x._is_view() and x.requires_grad:
            return  # PyTorch itself crashes when it regenerates such a view's `grad_fn` (`register_hook`)
        with torch.no_grad():
            x.detach().set_(y.detach())
            z = torch.zeros_like(y)
            z.set_(y.detach())
            w.keep(z)
    elif how == "resize_":
        z = y.detach().clone()
        z.resize_(max(z.numel() - 1, 0))
        w.keep(z, z.resize_((0,)), torch.ones(3).resize_(2, 1))
    elif how == "swap":
        torch.utils.swap_tensors(x, y)
    else:
        z = torch.zeros(0, dtype=y.dtype)
        z.data = y.data
        w.keep(z)
