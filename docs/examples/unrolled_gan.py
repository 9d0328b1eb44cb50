"""Unrolled GAN (Metz et al. 2016) on a ring of eight Gaussians.

The generator's loss looks through K steps of the discriminator's optimizer: a gradient of gradients.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


def ring(batch_size: int, modes: int = 8, radius: float = 2.0, deviation: float = 0.02):
    angle = torch.randint(modes, (batch_size,)) * (2 * math.pi / modes)
    centers = radius * torch.stack([angle.cos(), angle.sin()], 1)
    return centers + deviation * torch.randn(batch_size, 2)


def discriminator_loss(discriminator, parameters, real, fake):
    on_real = functional_call(discriminator, parameters, (real,))
    on_fake = functional_call(discriminator, parameters, (fake,))
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()


def unroll(discriminator, real, fake, steps: int, lr: float):
    """The discriminator's parameters after `steps` steps of gradient descent, as functions of `fake`."""
    parameters = dict(discriminator.named_parameters())
    for _ in range(steps):
        loss = discriminator_loss(discriminator, parameters, real, fake)
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        parameters = {
            name: parameter - lr * gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        }
    return parameters


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=8192)
parser.add_argument("--unroll", type=int, default=8, help="steps of the discriminator to look through")
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--latent", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--unroll-lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(args.seed)
generator = mlp(args.latent, args.hidden, 2).to(args.device)
discriminator = mlp(2, args.hidden, 1).to(args.device)
generator_optimizer = torch.optim.Adam(generator.parameters(), args.lr, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), args.lr, betas=(0.5, 0.999))

for step in range(1, args.steps + 1):
    real = ring(args.batch_size).to(args.device)
    fake = generator(torch.randn(args.batch_size, args.latent).to(args.device))

    unrolled = unroll(discriminator, real, fake, args.unroll, args.unroll_lr)
    generator_loss = F.softplus(-functional_call(discriminator, unrolled, (fake,))).mean()
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generator_optimizer.step()

    own = dict(discriminator.named_parameters())
    loss = discriminator_loss(discriminator, own, real, fake.detach())
    discriminator_optimizer.zero_grad()
    loss.backward()
    discriminator_optimizer.step()
    print(f"step {step} generator {generator_loss.item()!r} discriminator {loss.item()!r}")
