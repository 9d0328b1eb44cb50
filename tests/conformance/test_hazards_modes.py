"""Autocast, grad modes, functional transforms, control flow, custom operators, TorchScript."""

import torch
from programs import chain, check, check_stress, mlp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F


def test_autocast_in_and_out():
    def program():
        model = mlp(5)
        losses = []
        for _ in range(2):
            x = torch.sin(torch.randn(64, 32))
            with torch.autocast("cpu", torch.bfloat16):
                inside = model(x * 2)  # evicted here, recomputed below
                half = torch.mm(x, x.t())
            outside = torch.mm(inside.float().t(), inside.float()) + half.float()[:32, :32]
            with torch.autocast("cpu", torch.bfloat16):
                again = torch.mm(outside.cos(), outside)  # recomputes what was made outside autocast
                losses.append((outside.tolist(), inside.float().tolist()))  # the same, triggered by an escape
                with torch.autocast("cpu", enabled=False):
                    loss = (outside * again.float()).mean() + inside.float().sum()
            loss.backward()
            losses += [loss, inside, outside, again]
        return losses, model

    check(program)


def test_grad_modes():
    def program():
        model, kept, norm = mlp(3), [], nn.BatchNorm1d(32)
        x = torch.sin(torch.randn(64, 32))
        for step in range(3):
            with torch.inference_mode():
                inferred = chain(model(x), 3)
                inferred[1].add_(1)
                inferred[2][3:5] = 0
                inferred += [norm(inferred[3]), F.dropout(inferred[0], 0.3), F.linear(x, model[0].weight)]
            with torch.no_grad():
                without = chain(model(x + step), 3)
                fresh = inferred[3] * 2
            with torch.enable_grad():
                y = model(x)
            with torch.set_grad_enabled(step == 1):
                z = y.exp()
            kept += [
                inferred,
                without,
                fresh,
                y,
                z,
                z.requires_grad,
                inferred[3].is_inference(),
                fresh.is_inference(),
            ]
        kept[3].sum().backward()
        return kept, model, list(norm.buffers())

    check(program)


def test_functional_transforms():
    def program():
        model = mlp(2, 16)
        parameters = dict(model.named_parameters())
        x, y = torch.sin(torch.randn(24, 16)), torch.cos(torch.randn(24, 16))

        def loss(parameters, x, y):
            return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
        value, pull = torch.func.vjp(torch.sin, x)
        pushed = torch.func.jvp(lambda t: t.exp() * t, (x,), (y,))
        jacobian = torch.func.jacrev(lambda t: t.tanh().sum(0))(x)
        forward = torch.func.jacfwd(lambda t: t.sin() * 2)(x[0])
        hessian = torch.func.hessian(lambda t: (t**3).sum())(x[0])
        noise = torch.func.vmap(lambda t: t + torch.rand(16), randomness="different")(x)
        batched = torch.autograd.functional.jacobian(lambda t: (t * 2).exp().sum(0), x[:4], vectorize=True)
        return each, value, pull(y), pushed, jacobian, forward, hessian, noise, batched, chain(noise)

    check_stress(program)


def test_forward_mode_derivatives():
    def program():
        kept = []
        for step in range(3):
            with torch.autograd.forward_ad.dual_level():
                x = torch.autograd.forward_ad.make_dual(torch.randn(32, 32).sin(), torch.randn(32, 32).cos())
                y = (x @ x).tanh() + x.sum(0) * step
                kept += [*torch.autograd.forward_ad.unpack_dual(y)]
        return kept

    check_stress(program)


def test_control_flow_operators():
    def program():
        kept = []
        for step in range(4):
            x = torch.sin(torch.randn(64, 32) + step)
            y = torch.cond(x.sum() > 0, lambda t: t.exp() * 2, lambda t: t.cos() - 1, (x,))
            _, counted = torch._higher_order_ops.while_loop(
                lambda i, t: i < 3, lambda i, t: (i + 1, t * 0.5), (torch.tensor(0), y)
            )
            kept += [x, y, counted, y * 2]
        return kept

    check_stress(program)


def test_custom_operators_and_scripted_functions():
    @torch.library.custom_op("dtrrun_tests::smooth", mutates_args=())
    def smooth(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 0.5)

    @torch.library.custom_op("dtrrun_tests::bump", mutates_args={"x"})
    def bump(x: torch.Tensor, by: float) -> None:
        x.numpy()[...] += by

    @torch.jit.script
    def scripted(x: torch.Tensor, n: int):
        for _ in range(n):
            x = x * 0.5 + torch.sin(x)
            if bool(x.sum() > 0):
                x = x.relu_()
        return x, int(x.argmax())

    def program():
        kept = []
        for step in range(4):
            x = torch.sin(torch.randn(64, 32) + step)
            y = torch.ops.dtrrun_tests.smooth(x)
            z = y.exp()
            torch.ops.dtrrun_tests.bump(z, 1.0)
            kept += [x, y, z, z * 2]
        return kept

    check_stress(program)
    check_stress(lambda: [scripted(x, 3) for x in chain(torch.randn(64, 32), 4)])


def test_traced_and_frozen_modules():
    model = mlp(3).eval()
    traced = torch.jit.trace(model, torch.randn(4, 32), check_trace=False)
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(*model).eval()))

    def program():
        x = torch.sin(torch.randn(64, 32))
        kept = [traced(x * 2), frozen(x * 3)]
        with torch.no_grad():
            kept += [frozen(x), [frozen(y) for y in chain(x, 4)]]
        return kept

    check_stress(program)


def test_fake_and_meta_tensors_pass_through():
    def program():
        kept = chain(torch.sin(torch.randn(64, 32)))
        with FakeTensorMode() as mode:
            made = torch.empty(4, 4) @ torch.empty(4, 8)
            imitated = mode.from_tensor(kept[2]) * 2
        with torch.device("meta"):
            layer = nn.Linear(32, 32)
        shape = layer(kept[1].to("meta")).shape
        layer = layer.to_empty(device="cpu")
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
        return kept, made.shape, imitated.shape, shape, layer(kept[3]), layer

    check_stress(program)
