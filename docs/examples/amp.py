"""Vision transformer (Dosovitskiy et al. 2020) trained in mixed precision on generated textures.

bfloat16 by `torch.autocast`, gradient accumulation, clipping of gradients, a cosine learning rate.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class VisionTransformer(nn.Module):
    def __init__(self, size: int, patch: int, width: int, heads: int, depth: int, num_classes: int):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(x).mean(1))


def gratings(batch_size: int, size: int, num_classes: int):
    """Noisy sine gratings; the label is the orientation, in steps of 180° / num_classes."""
    labels = torch.randint(num_classes, (batch_size,))
    angle = (labels * math.pi / num_classes).view(-1, 1, 1)
    frequency = torch.empty(batch_size, 1, 1).uniform_(0.5, 1.5)
    phase = torch.empty(batch_size, 1, 1).uniform_(0, 2 * math.pi)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images = torch.sin(frequency * (x * angle.cos() + y * angle.sin()) + phase)
    return (images + 0.5 * torch.randn_like(images)).unsqueeze(1), labels


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=128, help="images in one forward and backward pass")
parser.add_argument("--accumulate", type=int, default=2, help="passes in one step of the optimizer")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--depth", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(args.seed)
model = VisionTransformer(32, 4, args.width, args.heads, args.depth, num_classes=6).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05, foreach=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(args.accumulate):
        images, labels = gratings(args.batch_size, 32, num_classes=6)
        with torch.autocast(args.device, torch.bfloat16):
            loss = F.cross_entropy(model(images.to(args.device)), labels.to(args.device)) / args.accumulate
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    print(f"step {step} loss {total!r} lr {scheduler.get_last_lr()[0]!r}")
    scheduler.step()
