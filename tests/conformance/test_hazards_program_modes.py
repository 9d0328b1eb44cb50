"""The program's own modes and tensor subclasses: each sees what it sees without dtrrun, nothing twice."""

import threading
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import pytest
import torch
from programs import assert_same, chain, check, check_stress, mlp, plain
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_map_only

import dtrrun
from dtrrun.extensions import build
from dtrrun.runtime.guards import without_our_key

_C = torch._C


class Log(TorchDispatchMode):
    """Records what it sees, in order. `more`: what a test wants to know about each call."""

    def __init__(self, name, seen, more=str):
        super().__init__()
        self.name, self.seen, self.more = name, seen, more

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(f"{self.name} {func} {sorted(one.__name__ for one in types)} {self.more()}")
        result = func(*args, **(kwargs or {}))
        self.seen.append(f"{self.name} has had {func}")
        return result


class Wrapped(torch.Tensor):
    """A tensor around another one; records what its `__torch_dispatch__` sees."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        size, dtype = inner.size(), inner.dtype
        return torch.Tensor._make_wrapper_subclass(cls, size, strides=inner.stride(), dtype=dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(f"subclass {func}")
        if func is torch.ops.aten.erf.default:
            return NotImplemented
        unwrapped = tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        result = tree_map_only(torch.Tensor, cls, func(*unwrapped[0], **unwrapped[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, result)


@pytest.fixture(autouse=True)
def nothing_seen():
    Wrapped.seen = []


OURS = _C._dispatch_key_parse(build.KEY)


def steps(model, count=3):
    """Run training steps with views, in-place operators, factories and random operators."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    kept = []
    for step in range(count):
        x = torch.arange(512.0).view(16, 32).sin() + torch.zeros(16, 1).fill_(step)
        loss = F.dropout(model(x), 0.2).add_(torch.ones(32)).t().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept += [*chain(x, 3), loss]
    return kept, list(model.parameters())


def test_nested_modes_see_everything_once_and_in_order():
    def program():
        seen = []
        model = mlp(3, 32, lambda: nn.BatchNorm1d(32))
        with Log("outer", seen):
            x = torch.randn(8, 32)
            with Log("inner", seen):
                kept = steps(model)
            y = torch.rand(4) + x.sum()
        return kept, y, seen

    check(program)


def test_subclasses_and_modes():
    def program():
        Wrapped.seen = seen = []
        x = Wrapped(torch.randn(32, 32).sin())
        kept = []
        with Log("outer", seen), Log("inner", seen):
            for step in range(4):
                y = (x * step).cos() @ x
                kept += [y, y.t(), torch.zeros(3), y.add_(1.0)]
        z = kept[-1].exp() + torch.ones(32)
        return [one.inner if isinstance(one, Wrapped) else one for one in kept], z.inner, seen

    check_stress(program)


def test_gradients_of_subclasses():
    def program():
        Wrapped.seen = []
        x = Wrapped(torch.randn(32, 32).sin()).requires_grad_()
        kept = [(x * step).tanh() @ x for step in range(1, 5)]
        sum(one.exp().mean() for one in kept).backward()
        return x.grad.inner, [one.detach().inner for one in kept], Wrapped.seen

    check_stress(program)


def test_what_a_subclass_declines_is_an_error():
    def program():
        x = Wrapped(torch.randn(32, 32))
        with pytest.raises(TypeError, match="erf"):
            x.erf()
        with Log("mode", []), pytest.raises(TypeError, match="erf"):
            x.erf()
        return chain(x.inner)

    check_stress(program)


def test_the_thread_is_set_as_without_us_in_a_handler():
    """Handlers find the same keys as without dtrrun, plus dtrrun's own, which their calls need."""

    def keys():
        included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
        ours_is_on.add(included.has(OURS) and not excluded.has(OURS))
        return f"{without_our_key(included)} {without_our_key(excluded)}"

    ours_is_on = set()

    def program():
        Wrapped.seen = seen = []
        with Log("outer", seen, keys), Log("inner", seen, keys):
            kept = chain(torch.randn(32, 32))
            with torch.inference_mode():
                kept += chain(torch.randn(32, 32))
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                kept += [kept[0] @ kept[0], torch.ones(3)]
        return kept, seen

    plain(program)
    assert ours_is_on == {False}
    ours_is_on.clear()
    check_stress(program)
    assert True in ours_is_on


def test_every_operator_beneath_modes_comes_to_the_session_once():
    def program(seen):
        with Log("outer", seen), Log("inner", []):
            return chain(torch.randn(32, 32)), torch.zeros(3).add_(1), torch.arange(5).view(5, 1)

    seen = []
    with dtrrun.budget(None) as session:
        program(seen)
        native = session.report()["native"]
    assert native["operators"] == sum(" has had " in one for one in seen)


def test_what_a_mode_calls_itself():
    class Checks(TorchDispatchMode):
        """Computes something of its own at each operator: below itself, through itself, past all modes."""

        def __init__(self, kept):
            super().__init__()
            self.kept, self.depth = kept, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point() and result.dim() == 2:
                self.kept.append(result.abs().amax(0) + torch.ones(()))
                with _disable_current_modes():
                    self.kept.append(result.neg().sum(0))
                if self.depth == 0:
                    self.depth += 1
                    with self:
                        self.kept.append(result * 2 + 1)
                    self.depth -= 1
            return result

    def program():
        seen, kept = [], []
        with Log("outer", seen), Checks(kept), Log("inner", seen):
            made = chain(torch.randn(32, 32))
        return kept, made, seen

    check_stress(program)


def test_a_mode_that_replaces_raises_and_retries():
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sin.default:
                return torch.cos(*args)
            if func is torch.ops.aten.mm.default:
                raise ArithmeticError("no products here")
            if func is torch.ops.aten.exp.default:
                func(*args)  # the result is discarded
            return func(*args, **(kwargs or {}))

    def program():
        x = torch.randn(32, 32).tanh()
        with Other(), Log("inner", seen := []):
            kept = [*chain(x), x.exp()]
            with pytest.raises(ArithmeticError, match="no products"):
                x @ x
            kept.append(x * 2)
        return kept, x @ x, seen

    check_stress(program)


def test_modes_in_inference_mode_with_composites():
    def program():
        model, seen = mlp(3), []
        with torch.inference_mode(), Log("outer", seen), Log("inner", seen):
            x = torch.randn(16, 32)
            kept = [
                model(x),
                F.linear(x, model[0].weight),
                F.dropout(x, 0.5),
                x.reshape(32, 16),
                x.matmul(x.t()),
            ]
            kept += chain(x)
        return kept, seen

    check_stress(program)


def test_functional_transforms_beneath_modes():
    def program():
        seen, x = [], torch.randn(16, 16).sin()
        with Log("mode", seen):
            each = torch.func.vmap(torch.func.grad(lambda t: (t.sin() * t).sum()))(x)
            batched = torch.func.vmap(lambda t: t @ x + torch.ones(16))(x)
            pushed = torch.func.jvp(lambda t: t.exp() * t, (x,), (x.cos(),))
            functional = torch.func.functionalize(lambda t: (t * 2).add_(1).view(-1).mul_(3))(x)
        return each, batched, pushed, functional, chain(each), seen

    check_stress(program)


def test_tracing_and_fake_tensors_between_modes():
    def traced(x):
        return torch.sin(x @ x).add_(torch.ones(32)).view(-1).cumsum(0)

    def program():
        seen, x = [], torch.randn(32, 32).sin()
        with Log("mode", seen):
            graph = make_fx(traced)(x)
            fake = make_fx(traced, tracing_mode="fake")(x)
            kept = [*chain(x), graph(x), fake(x)]
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                shape = list((torch.empty(64, 64) @ torch.ones(64, 3)).shape)
                shape += list(mode.from_tensor(x).sin().t().reshape(-1).shape)
        return kept, graph.code, fake.code, shape, seen

    check_stress(program)


def test_higher_order_operators_beneath_modes():
    def program():
        x, kept = torch.randn(64, 32).sin(), []
        for step in range(4):
            with torch.no_grad():
                y = torch.cond(x.sum() > step, lambda t: t.exp() * 2, lambda t: t.cos() - 1, (x,))
            with Log("mode", seen := []):
                kept += [y, y.tanh() + torch.ones(32), y.sum(0)]
        return kept, seen

    check_stress(program)


def test_random_numbers_beneath_modes():
    def program():
        seen = []
        with Log("mode", seen):
            noise = [
                torch.randn(32, 32),
                torch.rand(4),
                F.dropout(torch.ones(32, 32), 0.5),
                torch.randperm(9),
            ]
            noise += [torch.empty(64).uniform_(), torch.bernoulli(noise[2].clamp(0, 1)), torch.randperm(9)]
            kept = [chain(one.float()) for one in noise]
        return noise, kept, seen

    check_stress(program)


def test_modes_of_other_threads():
    def program():
        kept, seen = chain(torch.randn(32, 32)), []

        def other():
            with Log("there", seen):
                kept.extend(chain(kept[2] * 2))

        with Log("here", seen):
            kept += chain(kept[1])
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            kept.append(kept[-1].exp())
        return kept, seen

    check_stress(program)


def test_a_session_that_begins_within_a_mode():
    def program():
        x = torch.randn(32, 32).sin()
        return chain(x), x @ x, torch.ones(3)

    with Log("outer", expected := []):
        without = plain(program)
    with Log("outer", seen := []), dtrrun.budget(None):
        assert_same(without, plain(program), "within the mode")
    assert seen[: len(expected)] == expected


def test_a_session_within_a_handler():
    class Opens(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not torch.ops.aten.mm.default:
                return func(*args, **(kwargs or {}))
            with context() as session:
                kept = chain(args[0], 12)
                result = func(kept[-1], args[1])
                if session is not None:
                    evictions.append(session.report()["evictions"])
            return result + kept[3]

    def program():
        x = torch.randn(32, 32).sin()
        with Opens():
            return x @ x, x.exp()

    evictions, context = [], nullcontext
    expected = plain(program)
    context = partial(dtrrun.budget, 1, over_budget="evict")
    assert_same(expected, plain(program), "within the handler")
    assert evictions[0] > 0
    assert not _C._dispatch_tls_local_include_set().has(OURS)
