"""ResNet-1202 for CIFAR-10 (He, Zhang, Ren and Sun 2015, https://arxiv.org/abs/1512.03385, Sec. 4.2)."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.gpu.models.task import Task, images, momentum, supervised, through


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters (the paper's option A)."""

    def __init__(self, inputs: int, channels: int):
        super().__init__()
        self.stride = channels // inputs
        self.conv1 = nn.Conv2d(inputs, channels, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, 0, out.shape[1] - x.shape[1]))
        return F.relu(out + x)


class ResNet(nn.Module):
    """Depth 6 n + 2: three stages of n blocks, of 16, 32 and 64 channels. Depth 1202 has n = 200."""

    def __init__(self, n: int, classes: int = 10, checkpointing: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = [16] * (n + 1) + [32] * n + [64] * n
        self.blocks = nn.ModuleList(Block(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = through(block, x, checkpointing=self.checkpointing)
        return self.head(x.mean((2, 3)))


def task(device: str, checkpointing: bool, batch_size: int, size: int, n: int) -> Task:
    model = ResNet(n, checkpointing=checkpointing).to(device)
    inputs, target = images(device, batch_size, size, size, 10)
    return supervised(model, momentum(model), F.cross_entropy, inputs, target)
