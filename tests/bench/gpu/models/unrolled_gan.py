"""Unrolled GAN (Metz, Poole, Pfau and Sohl-Dickstein 2016, https://arxiv.org/abs/1611.02163).

As in the DTR paper: on a ring of Gaussians, unrolling steps of Adam, each on new samples, so that the
generator's gradient goes through the gradients of all of them.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.bench.gpu.models.task import Task

BETAS = (0.5, 0.999)
EPSILON = 1e-8

State = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Parameter, first and second moment, by the parameter's name."""


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def ring(count: int, device: str) -> torch.Tensor:
    """Return points from eight Gaussians of deviation 0.02 on a circle of radius 2."""
    angle = torch.randint(8, (count,), device=device) * (math.pi / 4)
    centres = torch.stack([angle.cos(), angle.sin()], 1) * 2
    return centres + 0.02 * torch.randn(count, 2, device=device)


def adam(state: State, gradients: tuple[torch.Tensor, ...], step: int, lr: float) -> State:
    """Take one differentiable step. `step` starts at 1."""
    result: State = {}
    for (name, (value, first, second)), gradient in zip(state.items(), gradients, strict=True):
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
        scale = lr * math.sqrt(1 - BETAS[1] ** step) / (1 - BETAS[0] ** step)
        # Epsilon goes under the root: at zero, as below a dead ReLU, the root's derivative is infinite.
        value = value - scale * first / (second + EPSILON**2).sqrt()
        result[name] = (value, first, second)
    return result


class UnrolledGAN(nn.Module):
    def __init__(self, latent: int, hidden: int):
        super().__init__()
        self.latent = latent
        self.generator = mlp(latent, hidden, 2)
        self.discriminator = mlp(2, hidden, 1)

    def samples(self, count: int, device: str) -> torch.Tensor:
        return self.generator(torch.randn(count, self.latent, device=device))

    def judged(self, state: State, points: torch.Tensor) -> torch.Tensor:
        """Return the discriminator's logits with the parameters in `state`."""
        return functional_call(self.discriminator, {name: one[0] for name, one in state.items()}, (points,))

    def discriminator_loss(self, state: State, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        on_real, on_fake = self.judged(state, real), self.judged(state, fake)
        return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()

    def unrolled(self, count: int, device: str, unroll: int, lr: float) -> State:
        """Return the discriminator's state after `unroll` optimizer steps, as a function of the generator."""
        state: State = {}
        for name, value in self.discriminator.named_parameters():
            state[name] = (value, torch.zeros_like(value), torch.zeros_like(value))
        for step in range(1, unroll + 1):
            loss = self.discriminator_loss(state, ring(count, device), self.samples(count, device))
            values = [value for value, _, _ in state.values()]
            state = adam(state, torch.autograd.grad(loss, values, create_graph=True), step, lr)
        return state


def task(device: str, checkpointing: bool, batch_size: int, unroll: int, latent: int, hidden: int) -> Task:
    model = UnrolledGAN(latent, hidden).to(device)
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=1e-4, betas=BETAS)
    of_discriminator = torch.optim.Adam(model.discriminator.parameters(), lr=1e-4, betas=BETAS)

    def step() -> torch.Tensor:
        own: State = {name: (value,) * 3 for name, value in model.discriminator.named_parameters()}
        with torch.no_grad():
            fake = model.samples(batch_size, device)
        of_discriminator.zero_grad()
        model.discriminator_loss(own, ring(batch_size, device), fake).backward()
        of_discriminator.step()

        state = model.unrolled(batch_size, device, unroll, lr=1e-4)
        loss = F.softplus(-model.judged(state, model.samples(batch_size, device))).mean()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        loss.backward()
        of_generator.step()
        return loss.detach()

    return Task((model,), step)
