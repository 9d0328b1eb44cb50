"""Networks and batches that several programs of this folder train."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.layers(x)


def mlp(width=64, depth=6, classes=10):
    return nn.Sequential(*(Residual(width) for _ in range(depth)), nn.Linear(width, classes))


def convnet(width=16, depth=4, classes=10):
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def rows(count=1024, width=64, classes=10):
    return torch.randn(count, width), torch.randint(0, classes, (count,))


def images(count=8, size=32, classes=10):
    return torch.randn(count, 3, size, size), torch.randint(0, classes, (count,))


def step(model, optimizer, x, y):
    """Take one optimizer step and return the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()
