"""ResNet-32 for small images (He et al. 2015, Sec. 4.2) on scikit-learn's handwritten digits.

Batch normalisation, in-place ReLU, and SGD with momentum.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Depth 6n + 2: a stem, three stages of n blocks with 16, 32 and 64 channels, a classifier."""

    def __init__(self, n: int, num_classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        blocks, in_channels = [], 16
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            for i in range(n):
                blocks.append(BasicBlock(in_channels, channels, stride if i == 0 else 1))
                in_channels = channels
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(in_channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.stages(self.stem(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def digits(size: int) -> TensorDataset:
    """1797 handwritten digits of 8 × 8 pixels, enlarged to `size` × `size`, mean 0 and deviation 1."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    return TensorDataset((x - x.mean()) / x.std(), torch.tensor(labels))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=18)
parser.add_argument("--batch-size", type=int, default=192)
parser.add_argument("--blocks", type=int, default=5, help="blocks in a stage")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(args.seed)
loader = DataLoader(digits(32), args.batch_size, shuffle=True, drop_last=True)
model = ResNet(args.blocks).to(args.device)
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)

step = 0
while step < args.steps:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(args.device)), labels.to(args.device))
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step} loss {loss.item()!r}")
        if step == args.steps:
            break
