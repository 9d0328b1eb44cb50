"""Many equal blocks of some MB: evictions leave gaps in the C library's heap that nothing fits into."""

import argparse

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(arguments.rows, 256)
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.6f}")


if __name__ == "__main__":
    main()
