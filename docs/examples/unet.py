"""U-Net (Ronneberger et al. 2015) that segments discs out of noise and clutter."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two 3×3 convolutions, each followed by batch normalisation and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """`depth` levels down and up again; each level has half the resolution and twice the channels."""

    def __init__(self, base: int, depth: int):
        super().__init__()
        widths = [base * 2**level for level in range(depth + 1)]
        self.encoders = nn.ModuleList(
            conv_block(a, b) for a, b in zip([1, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = conv_block(widths[-2], widths[-1])
        self.upsamples = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1])
        )
        self.decoders = nn.ModuleList(conv_block(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(base, 1, 1)

    def forward(self, x):
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for upsample, decoder in zip(self.upsamples, self.decoders, strict=True):
            x = decoder(torch.cat([skips.pop(), upsample(x)], 1))
        return self.head(x)


def dice_loss(logits, target):
    p = torch.sigmoid(logits)
    overlap = (p * target).sum((1, 2, 3))
    return 1 - ((2 * overlap + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()


def discs(batch_size: int, size: int, count: int = 3):
    """Images with `count` bright discs over noise and stripes, and the mask of the discs."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    center = torch.rand(batch_size, count, 2, 1, 1) * size
    radius = torch.empty(batch_size, count, 1, 1).uniform_(size / 16, size / 6)
    distance = ((x - center[:, :, 0]) ** 2 + (y - center[:, :, 1]) ** 2).sqrt()
    mask = (distance < radius).any(1, keepdim=True).float()
    stripes = 0.5 * torch.sin(x * torch.empty(batch_size, 1, 1, 1).uniform_(0.2, 0.8))
    return mask + stripes + 0.5 * torch.randn_like(mask), mask


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=18)
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--size", type=int, default=128, help="of the images, in pixels; a multiple of 2**depth")
parser.add_argument("--base", type=int, default=12, help="channels of the highest level")
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(args.seed)
model = UNet(args.base, args.depth).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), args.lr)

for step in range(1, args.steps + 1):
    images, masks = (part.to(args.device) for part in discs(args.batch_size, args.size))
    logits = model(images)
    loss = F.binary_cross_entropy_with_logits(logits, masks) + dice_loss(logits, masks)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
