"""How often a GPU's allocator would find no hole, on a model of it: `python -m tests.bench.gpu_holes`.

Training steps on the CPU, over the fake GPU of tests/unit with growing segments. Each flush is a wait for the
GPU and an unmapping of all that is free. Pages are a tenth of the real ones, as the programs are of real
ones.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from fake_gpu import FakeGpu, fake_session
from fake_growing import Growing

import dtrrun
from dtrrun.runtime import shares
from dtrrun.runtime.shares import LEAST_GUARD, MIB

CONTEXT = 300 * MIB
UNIT = MIB // 10 // 512 * 512
STEPS = 5
COUNTED = ("flushes", "ooms")
REPORTED = ("oom_retries", "evictions", "rematerializations")


class Dense(nn.Module):
    """Each layer reads all before it, so that concatenations grow and no hole is as large as the next."""

    def __init__(self, layers: int = 10, growth: int = 24) -> None:
        super().__init__()
        widths = [16 + number * growth for number in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 1)) for width in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def perceptron() -> nn.Module:
    return nn.Sequential(
        *[part for _ in range(10) for part in (nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1))]
    )


def convolutions() -> nn.Module:
    return nn.Sequential(*[part for _ in range(8) for part in (nn.Conv1d(8, 8, 3, padding=1), nn.GELU())])


PROGRAMS = {
    "densely connected": (Dense, lambda: torch.randn(16, 16, 48, 48)),
    "perceptron": (perceptron, lambda: torch.randn(2048, 512)),
    "changing lengths": (convolutions, lambda: torch.randn(16, 8, int(torch.randint(4000, 12000, ())))),
}


def train(name: str, budget: int | None, steps: int) -> tuple[int, list[list[int]]]:
    """Peak of the tensors, and by step what was counted."""
    make, batch = PROGRAMS[name]
    gpu = FakeGpu(CONTEXT)
    gpu.allocator = Growing(unit=UNIT)
    rows, before = [], [0] * (len(COUNTED) + len(REPORTED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "SEGMENT", 20 * UNIT)
        patch.setattr(shares, "LEAST_SLACK", 22 * UNIT)
        with fake_session(patch, budget, gpu=gpu, cost="model") as (session, _):
            torch.manual_seed(0)
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
            for _ in range(steps):
                optimizer.zero_grad()
                model(batch()).square().mean().backward()
                optimizer.step()
                report = session.report()
                now = [getattr(gpu.allocator, one) for one in COUNTED] + [report[one] for one in REPORTED]
                rows.append([after - one for after, one in zip(now, before, strict=True)])
                before = now
    return report["peak_bytes"], rows


def main() -> None:
    print("by step:", ", ".join((*COUNTED, *REPORTED)))
    for name in PROGRAMS:
        peak, _ = train(name, None, 2)
        for share in (0.7, 0.5):
            budget = CONTEXT + LEAST_GUARD + int(share * peak) + 22 * UNIT
            try:
                print(f"{name}, {share:.0%} of the peak:", *train(name, budget, STEPS)[1])
            except dtrrun.BudgetError as error:
                print(f"{name}, {share:.0%} of the peak: {error}")


if __name__ == "__main__":
    main()
