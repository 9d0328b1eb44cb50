"""DenseNet-BC (Huang et al. 2016) that tells apart generated textures by their orientation.

Every layer concatenates all earlier feature maps, so memory grows with the square of the depth.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class DenseLayer(nn.Sequential):
    """Batch norm, ReLU, 1×1 convolution to 4k channels; batch norm, ReLU, 3×3 convolution to k channels."""

    def __init__(self, in_channels: int, growth: int):
        super().__init__(
            nn.BatchNorm2d(in_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(in_channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, features):
        return super().forward(torch.cat(features, 1))


class DenseBlock(nn.ModuleList):
    def __init__(self, layers: int, in_channels: int, growth: int):
        super().__init__(DenseLayer(in_channels + i * growth, growth) for i in range(layers))

    def forward(self, x):
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    """Halves the channels and the resolution."""

    def __init__(self, in_channels: int):
        super().__init__(
            nn.BatchNorm2d(in_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(in_channels, in_channels // 2, 1, bias=False),
            nn.AvgPool2d(2),
        )


class DenseNet(nn.Sequential):
    def __init__(self, layers: int, growth: int, num_classes: int):
        channels = 2 * growth
        modules = [nn.Conv2d(1, channels, 3, padding=1, bias=False)]
        for block in range(3):
            if block > 0:
                modules.append(Transition(channels))
                channels //= 2
            modules.append(DenseBlock(layers, channels, growth))
            channels += layers * growth
        super().__init__(
            *modules,
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, num_classes),
        )


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
parser.add_argument("--steps", type=int, default=26)
parser.add_argument("--batch-size", type=int, default=40)
parser.add_argument("--layers", type=int, default=8, help="layers in a dense block")
parser.add_argument("--growth", type=int, default=12, help="channels that a layer adds")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(args.seed)
model = DenseNet(args.layers, args.growth, num_classes=6).to(args.device)
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)

for step in range(1, args.steps + 1):
    images, labels = gratings(args.batch_size, 32, num_classes=6)
    loss = F.cross_entropy(model(images.to(args.device)), labels.to(args.device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
