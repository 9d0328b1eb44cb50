"""Custom autograd functions, and operators whose schema does not declare what they write to."""

import numpy as np
import pytest
import torch
from programs import batch, chain, check, check_stress, in_memory, mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Scaled(torch.autograd.Function):
    """Saves inputs and outputs; its backward consists of operators."""

    @staticmethod
    def forward(ctx, x, factor):
        y = torch.exp(x * 0.1)
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return y * factor

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y * 0.1 * ctx.factor + 0 * x, None


class InNumpy(torch.autograd.Function):
    """Works in NumPy in both directions, on memory hidden from operators."""

    @staticmethod
    def forward(ctx, x):
        result = torch.as_tensor(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        _, result = ctx.saved_tensors
        return torch.from_numpy(gradient.numpy() * (1 - result.numpy() ** 2))


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(3)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def test_custom_functions():
    def program():
        model = mlp(4)
        losses = []
        for _ in range(2):
            x = model[:4](batch()[0])
            x = Scaled.apply(x, 2.0)
            x = InNumpy.apply(torch.sin(x))
            x = InPlace.apply(x * 2)
            loss = model[4:](x).square().mean()
            model.zero_grad()
            loss.backward()
            losses += [loss, x]
        return losses, model

    check(program)


class Opaque(torch.autograd.Function):
    """Reads memory by its address, as a native extension would: through the unpatched base class."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        assert in_memory(x)
        waste = [torch.sin(torch.randn(64, 32)) for _ in range(3)]
        assert in_memory(x), "evicted while the function still runs"
        return x + 0 * sum(waste)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        waste = [torch.sin(torch.randn(64, 32)) for _ in range(3)]
        assert in_memory(x)
        assert in_memory(gradient)
        return gradient + 0 * sum(waste)


class Boxed(Opaque):
    """Gets its gradients in a list from which it may remove them; as usual before PyTorch 2.15."""

    boxed_grads_call = True

    @staticmethod
    def backward(ctx, gradients):
        return Opaque.backward(ctx, gradients.pop() if isinstance(gradients, list) else gradients)


@pytest.mark.parametrize("function", [Opaque, Boxed])
def test_tensors_of_a_custom_function_stay_in_memory_while_it_runs(function):
    def program():
        w = torch.randn(64, 32, requires_grad=True)
        x = w
        for _ in range(4):
            x = function.apply(torch.sin(x))
        x.sum().backward()
        return x, w.grad

    check_stress(program)


NORMS = {
    "default": {},
    "momentum none": {"momentum": None},
    "not affine": {"affine": False},
    "no running stats": {"track_running_stats": False},
}


@pytest.mark.parametrize("options", NORMS)
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics_are_updated_once(kind, options):
    def program():
        arguments = NORMS[options]
        if kind is nn.InstanceNorm2d:
            arguments = {"track_running_stats": True, "momentum": 0.2, **arguments}
            if arguments["momentum"] is None:
                arguments["momentum"] = 0.0
        layers = []
        for _ in range(4):
            layers += [nn.Conv2d(4, 4, 3, padding=1), kind(4, **arguments), nn.ReLU()]
        model = nn.Sequential(*layers)
        kept = []
        for step in range(3):
            model.train(step != 1)  # evaluation in between reads what training wrote
            y = model(torch.randn(8, 4, 8, 8))
            kept += [y, *(b.clone() for b in model.buffers())]
            y.square().mean().backward()
        return kept, model

    check(program)


def test_batchnorm_in_checkpoint_and_forward_twice():
    def program():
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32))
        x = torch.randn(64, 32, requires_grad=True)
        y = model(x)
        z = checkpoint(model, y, use_reentrant=False)
        u = F.batch_norm(z, torch.zeros(32), torch.ones(32), training=True)
        (y + z + u).square().mean().backward()
        return y, z, u, model, x.grad, chain(u)

    check(program)
