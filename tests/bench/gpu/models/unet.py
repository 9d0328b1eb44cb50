"""U-Net (Ronneberger, Fischer and Brox 2015, https://arxiv.org/abs/1505.04597, Fig. 1).

As in the DTR paper: padded convolutions with batch normalization, and bilinear upsampling, for which the
lowest level has half the channels. With `bilinear=False` it is Ronneberger's, with up-convolutions.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.gpu.models.task import Task, supervised, through


def double(inputs: int, outputs: int, between: int = 0) -> nn.Sequential:
    """Two 3×3 convolutions with `between` channels between them (0: as many as `outputs`)."""
    between = between or outputs
    layers: list[nn.Module] = []
    for a, b in ((inputs, between), (between, outputs)):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four levels down and up again, starting with `base` channels; height and width: multiples of 16."""

    def __init__(self, channels: int, classes: int, base: int = 64, bilinear: bool = True, **options: bool):
        super().__init__()
        self.checkpointing = options.get("checkpointing", False)
        widths = [base * 2**level for level in range(5)]
        factor = 2 if bilinear else 1
        outputs = [*widths[:-1], widths[-1] // factor]
        self.down = nn.ModuleList(
            double(a, b) for a, b in zip([channels, *widths[:-1]], outputs, strict=True)
        )
        self.ups, self.merges = nn.ModuleList(), nn.ModuleList()
        for level in (3, 2, 1, 0):
            wide, width = widths[level + 1], widths[level]
            if bilinear:
                self.ups.append(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))
                self.merges.append(double(wide, width // (factor if level else 1), between=wide // 2))
            else:
                self.ups.append(nn.ConvTranspose2d(wide, width, 2, stride=2))
                self.merges.append(double(wide, width))
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = through(block, F.max_pool2d(x, 2) if level else x, checkpointing=self.checkpointing)
            skips.append(x)
        skips.pop()
        for up, block in zip(self.ups, self.merges, strict=True):
            x = through(block, torch.cat([skips.pop(), up(x)], 1), checkpointing=self.checkpointing)
        return self.head(x)


def task(device: str, checkpointing: bool, batch_size: int, height: int, width: int, base: int) -> Task:
    model = UNet(3, 1, base, checkpointing=checkpointing).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9)
    x = torch.randn(batch_size, 3, height, width).to(device)
    mask = (torch.rand(batch_size, 1, height, width) < 0.5).float().to(device)
    return supervised(model, optimizer, F.binary_cross_entropy_with_logits, (x,), mask)
