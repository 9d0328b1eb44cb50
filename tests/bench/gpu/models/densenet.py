"""DenseNet-121 (Huang, Liu, van der Maaten, Weinberger 2016, https://arxiv.org/abs/1608.06993, Table 1)."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.gpu.models.task import Task, images, momentum, supervised, through


class Layer(nn.Module):
    """BN, ReLU, 1×1 convolution to four times the growth; BN, ReLU, 3×3 convolution to the growth."""

    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.bottleneck = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.convolution = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, *earlier: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(torch.cat(earlier, 1)), inplace=True)
        return self.convolution(F.relu(self.norm2(self.bottleneck(x)), inplace=True))


class DenseNet(nn.Module):
    """`layers`: the number in each dense block; DenseNet-121 has 6, 12, 24, 16 and a growth of 32.

    A checkpoint is a layer with its concatenation; only its output is kept (Pleiss et al. 2017).
    """

    def __init__(self, layers: tuple[int, ...], growth: int, classes: int, checkpointing: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        channels = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for count in layers:
            if len(self.blocks):
                self.transitions.append(
                    nn.Sequential(
                        nn.BatchNorm2d(channels),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(channels, channels // 2, 1, bias=False),
                        nn.AvgPool2d(2),
                    )
                )
                channels //= 2
            self.blocks.append(nn.ModuleList(Layer(channels + i * growth, growth) for i in range(count)))
            channels += count * growth
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number:
                x = self.transitions[number - 1](x)
            features = [x]
            for layer in block:
                features.append(through(layer, *features, checkpointing=self.checkpointing))
            x = torch.cat(features, 1)
        x = F.relu(self.norm(x), inplace=True)
        return self.head(x.mean((2, 3)))  # not adaptive pooling: see inception_v4.py


def task(
    device: str,
    checkpointing: bool,
    batch_size: int,
    size: int,
    layers: tuple[int, ...],
    growth: int,
    classes: int,
) -> Task:
    model = DenseNet(layers, growth, classes, checkpointing).to(device)
    inputs, target = images(device, batch_size, size, size, classes)
    return supervised(model, momentum(model), F.cross_entropy, inputs, target)
