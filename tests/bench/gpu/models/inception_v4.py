"""Inception-v4 (Szegedy, Ioffe, Vanhoucke and Alemi 2016, https://arxiv.org/abs/1602.07261, Figs. 3 to 9)."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.gpu.models.task import Task, images, momentum, supervised, through

SAME = -1
"""Padding that keeps the size; `V` in the paper's figures means no padding."""


class Conv(nn.Sequential):
    """Convolution, batch normalization, ReLU; `kernel` is height, width."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int], stride: int = 1, pad: int = SAME):
        padding = (kernel[0] // 2, kernel[1] // 2) if pad == SAME else (pad, pad)
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.ReLU(inplace=True),
        )


def chain(inputs: int, *convolutions: tuple[int, int, int]) -> nn.Sequential:
    """Convolutions one after the other, each given as outputs, height, width."""
    layers = []
    for outputs, height, width in convolutions:
        layers.append(Conv(inputs, outputs, (height, width)))
        inputs = outputs
    return nn.Sequential(*layers)


def halved(before: nn.Sequential, inputs: int, outputs: int) -> nn.Sequential:
    """Return `before` followed by a 3×3 convolution that halves height and width."""
    return nn.Sequential(*before, Conv(inputs, outputs, (3, 3), stride=2, pad=0))


class Split(nn.Sequential):
    """Several branches that read one output; their outputs are concatenated."""

    def __init__(self, before: nn.Module, *branches: nn.Module):
        super().__init__(before, *branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, *branches = self
        x = before(x)
        return torch.cat([branch(x) for branch in branches], 1)


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    average = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(average, Conv(inputs, outputs, (1, 1)))


def stem() -> list[nn.Module]:
    """299 × 299 × 3 to 35 × 35 × 384 (Fig. 3)."""
    begin = nn.Sequential(
        Conv(3, 32, (3, 3), stride=2, pad=0), Conv(32, 32, (3, 3), pad=0), Conv(32, 64, (3, 3))
    )
    short = nn.Sequential(*chain(160, (64, 1, 1)), Conv(64, 96, (3, 3), pad=0))
    long = nn.Sequential(*chain(160, (64, 1, 1), (64, 7, 1), (64, 1, 7)), Conv(64, 96, (3, 3), pad=0))
    return [
        Split(begin, nn.MaxPool2d(3, 2), Conv(64, 96, (3, 3), stride=2, pad=0)),
        Split(nn.Identity(), short, long),
        Split(nn.Identity(), Conv(192, 192, (3, 3), stride=2, pad=0), nn.MaxPool2d(3, 2)),
    ]


def inception_a() -> Split:
    return Split(
        nn.Identity(),
        pooled(384, 96),
        chain(384, (96, 1, 1)),
        chain(384, (64, 1, 1), (96, 3, 3)),
        chain(384, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
    )


def inception_b() -> Split:
    return Split(
        nn.Identity(),
        pooled(1024, 128),
        chain(1024, (384, 1, 1)),
        chain(1024, (192, 1, 1), (224, 1, 7), (256, 7, 1)),
        chain(1024, (192, 1, 1), (192, 1, 7), (224, 7, 1), (224, 1, 7), (256, 7, 1)),
    )


def inception_c() -> Split:
    return Split(
        nn.Identity(),
        pooled(1536, 256),
        chain(1536, (256, 1, 1)),
        Split(chain(1536, (384, 1, 1)), Conv(384, 256, (1, 3)), Conv(384, 256, (3, 1))),
        Split(
            chain(1536, (384, 1, 1), (448, 1, 3), (512, 3, 1)),
            Conv(512, 256, (3, 1)),
            Conv(512, 256, (1, 3)),
        ),
    )


def reduction_a() -> Split:
    """To 17 × 17 × 1024; k, l, m, n of Table 1 are 192, 224, 256, 384."""
    return Split(
        nn.Identity(),
        nn.MaxPool2d(3, 2),
        Conv(384, 384, (3, 3), stride=2, pad=0),
        halved(chain(384, (192, 1, 1), (224, 3, 3)), 224, 256),
    )


def reduction_b() -> Split:
    """To 8 × 8 × 1536."""
    return Split(
        nn.Identity(),
        nn.MaxPool2d(3, 2),
        halved(chain(1024, (192, 1, 1)), 192, 192),
        halved(chain(1024, (256, 1, 1), (256, 1, 7), (320, 7, 1)), 320, 320),
    )


class InceptionV4(nn.Module):
    """`a`, `b`, `c`: the number of each block; the paper has 4, 7 and 3."""

    def __init__(self, classes: int, a: int = 4, b: int = 7, c: int = 3, checkpointing: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(
            [
                *stem(),
                *(inception_a() for _ in range(a)),
                reduction_a(),
                *(inception_b() for _ in range(b)),
                reduction_b(),
                *(inception_c() for _ in range(c)),
            ]
        )
        self.head = nn.Linear(1536, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = through(block, x, checkpointing=self.checkpointing)
        # Not adaptive pooling: its backward has no deterministic kernel on CUDA.
        return self.head(F.dropout(x.mean((2, 3)), 0.2, self.training))


def task(device: str, checkpointing: bool, batch_size: int, size: int, classes: int, **blocks: int) -> Task:
    model = InceptionV4(classes, checkpointing=checkpointing, **blocks).to(device)
    inputs, target = images(device, batch_size, size, size, classes)
    return supervised(model, momentum(model), F.cross_entropy, inputs, target)
