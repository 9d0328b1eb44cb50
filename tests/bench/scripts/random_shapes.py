"""Trains a small network whose batch and depth are drawn at random in each step: no step is like another."""

import argparse
import random

import torch
from torch import nn

WIDTH = 256

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=120)
args = parser.parse_args()

torch.manual_seed(0)
random.seed(0)
layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(24))
optimizer = torch.optim.SGD(layers.parameters(), 0.01)
for _ in range(args.steps):
    state = torch.randn(random.randint(600, 1200), WIDTH)
    for layer in layers[: random.randint(12, 24)]:
        state = layer(state).tanh() + state
    loss = state.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
