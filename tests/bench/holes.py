"""Whether a larger budget fails where a smaller one runs.

`python -m tests.bench.holes [MODEL…] [--rule RULE…] [--every N]`, from the project's folder. Five simple
models train for two steps inside budgets from below the least that runs up to their peak, in steps of 1 % of
it, each time with the same results to the last bit or a `BudgetError`. A hole is a budget that fails above
the least that runs. Costs are those of `--cost model`, so that every run is the same.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

import dtrrun
from tests.bench.section import row

RULES = ("h_dtr_eq", "auto")
STEPS = 2
FAILURES = 5
"""Consecutive failing budgets after which no smaller one is tried."""


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 8), (8, 16), (16, 16)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(2))
        )
        self.out = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(len(x), 16)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.out(h)


class Skips(nn.Module):
    """A small U-Net: what a level computes on the way down is needed again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 8, 16, 32)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU())
            for a, b in pairwise(sizes)
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a + b, a, 3, padding=1), nn.ReLU()) for a, b in ((16, 32), (8, 16))
        )
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level, down in enumerate(self.down):
            x = down(x if not level else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        x = kept.pop()
        for up in self.up:
            x = up(torch.cat([kept.pop(), nn.functional.interpolate(x, scale_factor=2)], 1))
        return self.out(x)


def layers() -> nn.Module:
    return nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(64, 64), nn.Tanh())])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (layers, (1024, 64)),
    "convnet": (Convolutions, (4, 3, 16, 16)),
    "transformer": (Attention, (8, 32, 32)),
    "lstm": (Recurrent, (128, 8, 16)),
    "unet": (Skips, (4, 3, 32, 32)),
}
"""For each model, the function that makes it, and the size of a batch."""


def train(name: str) -> list[float]:
    torch.manual_seed(0)
    make, size = MODELS[name]
    net, x = make(), torch.randn(size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *(float(p.detach().double().sum()) for p in net.parameters())]


class Found(NamedTuple):
    model: str
    rule: str
    peak: int
    runs: list[int]
    """The percentages of the peak at which it runs."""
    fails: list[int]

    @property
    def holes(self) -> list[int]:
        return [percent for percent in self.fails if self.runs and percent > min(self.runs)]


def inside(name: str, rule: str, budget: int | None) -> tuple[list[float] | None, int]:
    """Return the results, or None after a `BudgetError`; and the peak."""
    with dtrrun.budget(budget, heuristic=rule, cost="model") as session:
        try:
            result = train(name)
        except dtrrun.BudgetError:
            result = None
        peak = int(session.report()["peak_bytes"])
    gc.collect()  # as at the start of a program
    return result, peak


def sweep(name: str, rule: str, percents: Iterable[int], failures: int = FAILURES) -> Found:
    """Train inside these shares of the peak, from the largest down, until `failures` in a row fail."""
    expected = train(name)
    result, peak = inside(name, rule, None)
    assert result == expected
    found = Found(name, rule, peak, [], [])
    for percent in sorted(percents, reverse=True):
        budget = peak * percent // 100
        result, most = inside(name, rule, budget)
        if result is None:
            found.fails.append(percent)
        else:
            assert result == expected, f"{name}, {rule}, {percent} %: other results"
            found.runs.append(percent)
        assert most <= budget, f"{name}, {rule}, {percent} %: over the budget"
        if len(found.fails) >= failures and found.fails[-failures] < min(found.runs, default=101):
            break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.holes", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--rule", nargs="+", default=RULES, metavar="RULE")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="steps of N %% of the peak")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    headers = ["Model", "Rule", "Peak", "Least that runs", "Budgets above it", "Holes"]
    print(row(headers), row(["---", "---", *["---:"] * 4]), sep="\n", flush=True)
    holes = 0
    for name in args.models or MODELS:
        for rule in args.rule:
            found = sweep(name, rule, range(100, 4, -args.every))
            least = min(found.runs)
            above = sum(percent > least for percent in (*found.runs, *found.fails))
            told = ", ".join(f"{percent} %" for percent in sorted(found.holes)) or "none"
            print(row([name, rule, f"{found.peak:,}", f"{least} %", str(above), told]), flush=True)
            holes += len(found.holes)
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
