"""A model inside the peak that `torch.utils.checkpoint` reaches, compared with checkpointing itself."""

import contextlib
import time
from statistics import median

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtrrun
from tests.bench.section import Section

AT_MOST = 1.0

TEXT = """\
Each model is trained as it is, with every block (or every second one) as a checkpoint of
`torch.utils.checkpoint`, and unchanged inside the peak that these checkpoints reach. The times are
processor times of a step after the second, as multiples of the plain model's in the same round, medians
of the rounds. The last column is the ratio of dtrrun's to that of checkpoints. The losses must be the
same to the last digit. Eight steps are too few for a run to learn which heuristic suits it."""


class Convolutions(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = []
        for _ in range(2):
            layers += [
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))


class Attention(nn.Module):
    """A transformer block whose attention weights are ordinary tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norms[0](x)
        query, key, value = (
            part(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = self.dropout(scores.masked_fill(later, float("-inf")).softmax(-1))
        x = x + self.dropout(self.out((weights @ value).transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.feed_forward(self.norms[1](x)))


class Blocks(nn.Module):
    """every: blocks per checkpoint, 0 for no checkpointing."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module, every: int) -> None:
        super().__init__()
        self.first, self.blocks, self.last, self.every = first, nn.ModuleList(blocks), last, every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for place in range(0, len(self.blocks), self.every or 1):
            part = nn.Sequential(*self.blocks[place : place + (self.every or 1)])
            x = checkpoint(part, x, use_reentrant=False) if self.every else part(x)
        return self.last(x)


def residual_network(every: int):
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))
    model = Blocks(nn.Conv2d(3, 48, 3, padding=1), [Convolutions(48) for _ in range(12)], last, every)
    return model, torch.randn(12, 3, 32, 32), torch.randint(0, 10, (12,))


def transformer(every: int):
    blocks = [Attention(192, 4) for _ in range(10)]
    model = Blocks(nn.Embedding(256, 192), blocks, nn.Linear(192, 256), every)
    words = torch.randint(0, 256, (8, 129))
    return model, words[:, :-1], words[:, 1:]


MODELS = {"residual network": residual_network, "transformer": transformer}
EVERY = (1, 2)


def train(make, every: int, steps: int) -> tuple[float, float]:
    """Return the median time of the steps after the second, and the last loss."""
    torch.manual_seed(0)
    model, inputs, targets = make(every)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    times = []
    for _ in range(steps):
        start = time.process_time()
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    return median(times[2:]), loss.item()


def peak_of(make, every: int) -> int:
    with dtrrun.budget(None, device="cpu") as session:
        train(make, every, 3)
    return session.report()["peak_bytes"]


def measure(quick: bool) -> Section:
    torch.set_num_threads(1)
    rounds, steps = (1, 4) if quick else (5, 8)
    headers = [
        "Model, blocks in a checkpoint",
        "Share of the peak",
        "Checkpoints",
        "dtrrun",
        "dtrrun / checkpoints",
    ]
    section = Section("20. Against checkpoints", TEXT, headers)
    for name, make in MODELS.items():
        whole = peak_of(make, 0)
        budgets = {every: peak_of(make, every) for every in EVERY}
        ratios: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            plain, expected = train(make, 0, steps)
            for every, budget in budgets.items():
                for way, inside in ("checkpoints", None), ("dtrrun", budget):
                    with dtrrun.budget(inside, device="cpu") if inside else contextlib.nullcontext():
                        took, loss = train(make, 0 if inside else every, steps)
                    if loss != expected:
                        raise AssertionError(f"{name}, {way}: a loss of {loss} instead of {expected}")
                    ratios.setdefault((way, every), []).append(took / plain)
        for every, budget in budgets.items():
            theirs, ours = ratios["checkpoints", every], ratios["dtrrun", every]
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            found = [f"{median(values):.2f}" for values in (theirs, ours)]
            section.rows.append([f"{name}, {every}", f"{budget / whole:.0%}", *found, f"{ratio:.2f}"])
            if ratio > AT_MOST:
                section.missed.append(f"{name}, {every}: {ratio:.2f}, should be at most {AT_MOST}")
    return section
