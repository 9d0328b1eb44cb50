"""Programs compiled by `torch.compile`: with and without dtrrun, eagerly, and with checkpoints."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

import dtrrun
from dtrrun.core.heuristics import STEADY
from tests.bench.checkpointing import Attention, Blocks
from tests.bench.section import Section

AMPLE, AGAINST_EAGER, AGAINST_CHECKPOINTS, TINY = 1.03, 1.0, 0.95, 1.5

TEXT = """\
Processor times of a step after the second, in which nothing is compiled any more; medians of rounds in which
each way has its turn. Plain times are multiples of the plain compiled program's. "Ample" is dtrrun without
eviction. "60%" is dtrrun inside 60 % of the compiled peak; "eager" the same with `--compile eager`, inside
as many bytes. "Checkpoints" are compiled blocks, each a checkpoint of `torch.utils.checkpoint`; "at their
peak" is dtrrun inside what that takes, without checkpoints. The losses must be those of the plain compiled
program to the last digit. The last row is a graph of one kernel on 64 elements, called alone."""


class Pointwise(nn.Module):
    """Many operators that inductor fuses into one kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for _ in range(4):
            y = torch.relu(y * self.scale + self.shift) * 0.5 + y - y.clamp(-1, 1) * 0.1
        return x + self.mix(y)


class Flat(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.width)).mean(-2)


def pointwise(every: int) -> tuple[Blocks, torch.Tensor, torch.Tensor]:
    model = Blocks(nn.Identity(), [Pointwise(128) for _ in range(8)], Flat(16), every)
    return model, torch.randn(4096, 128), torch.randint(0, 16, (4096,))


def transformer(every: int) -> tuple[Blocks, torch.Tensor, torch.Tensor]:
    model = Blocks(nn.Embedding(256, 192), [Attention(192, 4) for _ in range(8)], nn.Linear(192, 256), every)
    words = torch.randint(0, 256, (8, 129))
    return model, words[:, :-1], words[:, 1:]


@dataclass(frozen=True)
class Program:
    make: Callable[[int], tuple[Blocks, torch.Tensor, torch.Tensor]]
    whole: bool  # one graph for the whole model, rather than one per block


PROGRAMS = {
    "pointwise, by block": Program(pointwise, whole=False),
    "transformer, by block": Program(transformer, whole=False),
    "transformer, whole": Program(transformer, whole=True),
}
PLAIN, EAGER, AMPLY, INSIDE, EAGERLY_INSIDE, CHECKPOINTS, AT_THEIR_PEAK = range(7)


def train(program: Program, steps: int, *, compiled: bool = True, every: int = 0) -> tuple[float, float]:
    """Return the median time of the steps after the second, and the last loss."""
    torch.manual_seed(0)
    model, inputs, targets = program.make(every)
    if compiled:
        for part in (model,) if program.whole and not every else model.blocks:
            part.compile()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    times = []
    for _ in range(steps):
        start = time.process_time()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    return median(times[2:]), loss.item()


def peak_of(program: Program, every: int) -> int:
    with dtrrun.budget(None, device="cpu") as session:
        train(program, 3, every=every)
    return session.report()["peak_bytes"]


def ways(program: Program, steps: int) -> dict[int, Callable[[], tuple[float, float]]]:
    most = peak_of(program, 0)
    theirs, share = peak_of(program, 1), most * 3 // 5

    def inside(budget: int | None, compile: str = "auto") -> tuple[float, float]:
        with dtrrun.budget(budget, device="cpu", heuristic=STEADY, compile=compile):  # no search
            return train(program, steps)

    return {
        PLAIN: lambda: train(program, steps),
        EAGER: lambda: train(program, steps, compiled=False),
        AMPLY: lambda: inside(None),
        INSIDE: lambda: inside(share),
        EAGERLY_INSIDE: lambda: inside(share, "eager"),
        CHECKPOINTS: lambda: train(program, steps, every=1),
        AT_THEIR_PEAK: lambda: inside(theirs),
    }


def tiny(rounds: int) -> tuple[float, float]:
    """Return the time of a call in µs, without and with dtrrun."""
    compiled = torch.compile(lambda x: torch.sin(x) * 2 + 1)

    def call(times: int = 20_000) -> float:
        with torch.no_grad():
            x = torch.randn(64)
            compiled(x)
            start = time.process_time()
            for _ in range(times):
                compiled(x)
            return (time.process_time() - start) / times * 1e6

    plain, under = [], []
    for _ in range(rounds):
        plain.append(call())
        with dtrrun.budget(None, device="cpu"):
            under.append(call())
    return median(plain), median(under)


def measure(quick: bool) -> Section:
    torch.set_num_threads(1)
    rounds, steps = (1, 4) if quick else (5, 8)
    headers = ["Program", "Eager", "Ample", "60%", "60%, eager", "Checkpoints", "dtrrun at their peak"]
    section = Section("25. Compiled programs", TEXT, headers)
    for name, program in PROGRAMS.items():
        run = ways(program, steps)
        ratios: dict[int, list[float]] = {way: [] for way in run}
        for _ in range(rounds):
            took = {}
            for way, function in run.items():
                torch._dynamo.reset()
                took[way], loss = function()
                if way == PLAIN:
                    expected = loss
                elif way in (AMPLY, INSIDE, AT_THEIR_PEAK) and loss != expected:
                    raise AssertionError(f"{name}, way {way}: a loss of {loss} instead of {expected}")
            torch._dynamo.reset()
            took[PLAIN] = (took[PLAIN] + train(program, steps)[0]) / 2  # before and after the others
            for way, seconds in took.items():
                ratios[way].append(seconds / took[PLAIN])
        found = {way: median(values) for way, values in ratios.items()}
        section.rows.append([name, *(f"{found[way]:.2f}" for way in range(EAGER, AT_THEIR_PEAK + 1))])
        against_eager = median(a / b for a, b in zip(ratios[INSIDE], ratios[EAGERLY_INSIDE], strict=True))
        against = median(a / b for a, b in zip(ratios[AT_THEIR_PEAK], ratios[CHECKPOINTS], strict=True))
        for what, ratio, limit in (
            ("ample", found[AMPLY], AMPLE),
            ("inside 60 %, of eager's time", against_eager, AGAINST_EAGER),
            ("at their peak, of checkpoints' time", against, AGAINST_CHECKPOINTS),
        ):
            if ratio > limit:
                section.missed.append(f"{name}, {what}: {ratio:.2f}, should be at most {limit}")
    plain, under = tiny(rounds)
    section.rows.append([f"64 elements: {plain:.1f} µs", "–", f"{under / plain:.2f}", *["–"] * 4])
    if under / plain > TINY:
        section.missed.append(f"64 elements: {under / plain:.2f}, should be at most {TINY}")
    return section
