"""Convolutional variational autoencoder (Kingma and Welling 2013) of scikit-learn's handwritten digits.

Residual blocks with group normalisation and SiLU; the latent is sampled by the reparametrisation trick.
"""

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.residual = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x):
        return x + self.residual(x)


class VAE(nn.Module):
    """Images of 32 × 32 pixels, down to 4 × 4 and up again."""

    def __init__(self, base: int, latent: int, blocks: int):
        super().__init__()
        widths = [base, 2 * base, 4 * base, 4 * base]
        encoder = [nn.Conv2d(1, base, 3, padding=1)]
        for before, after in pairwise(widths):
            encoder += [ResidualBlock(before) for _ in range(blocks)]
            encoder += [nn.Conv2d(before, after, 3, stride=2, padding=1)]
        encoder += [nn.SiLU(), nn.Flatten(), nn.Linear(widths[-1] * 16, 2 * latent)]
        self.encoder = nn.Sequential(*encoder)

        decoder = [nn.Linear(latent, widths[-1] * 16), nn.Unflatten(1, (widths[-1], 4, 4))]
        for before, after in pairwise(reversed(widths)):
            decoder += [nn.Conv2d(before, after, 3, padding=1), nn.Upsample(scale_factor=2)]
            decoder += [ResidualBlock(after) for _ in range(blocks)]
        decoder += [nn.SiLU(), nn.Conv2d(base, 1, 3, padding=1)]
        self.decoder = nn.Sequential(*decoder)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(z), mean, log_variance


def negative_elbo(logits, x, mean, log_variance):
    """Of an image, in nats: the reconstruction's cross-entropy and the divergence from the prior."""
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())
    return (reconstruction + divergence) / len(x)


def digits() -> torch.Tensor:
    """1797 handwritten digits of 8 × 8 pixels, enlarged to 32 × 32, between 0 and 1."""
    x = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    return F.interpolate(x, size=32, mode="bilinear", align_corners=False)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=26)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--base", type=int, default=16, help="channels at the full resolution")
parser.add_argument("--blocks", type=int, default=2, help="residual blocks at a resolution")
parser.add_argument("--latent", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(args.seed)
loader = DataLoader(digits(), args.batch_size, shuffle=True, drop_last=True)
model = VAE(args.base, args.latent, args.blocks).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), args.lr)

step = 0
while step < args.steps:
    for batch in loader:
        x = batch.to(args.device)
        logits, mean, log_variance = model(x)
        loss = negative_elbo(logits, x, mean, log_variance)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step} loss {loss.item()!r}")
        if step == args.steps:
            break
