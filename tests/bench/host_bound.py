"""What dtrrun adds to a host-bound training step, with an ample budget and with a small one."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

import dtrrun
from tests.bench.overhead import Empty
from tests.bench.section import Section

SHARE = 0.6
COUNTED, AMPLE, FULL = "without a budget", "an ample budget", "an ample budget, nothing only counted"
AT_MOST = {COUNTED: 1.1, AMPLE: 1.15, f"{SHARE:.0%} of the peak": 3.0}

TEXT = f"""\
A recurrent network of LSTM cells with batch normalization on small tensors, trained under AdamW, one
tensor at a time: about 7,000 operators a step, each of a few µs. The table shows the processor time of a
step after the third of a session, as a multiple of the plain step of the same round: the median of the
rounds, with the least and the most in brackets. The losses must be the same to the last digit. While
memory is ample, operators are only counted, but for one row, in which each is recorded as inside a small
budget. Inside {SHARE:.0%} of the peak, a sixth of the operators run again, which is part of the time. In two
threads at once, each trains a network of its own; the table has the processor time of one of their steps."""

WORDS, WIDTH, ROWS, LENGTH = 100, 32, 8, 60


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states = [torch.zeros(2, len(words), WIDTH).unbind() for _ in self.layers]
        logits = []
        for word in words.T:
            x = self.embedding(word)
            for place, layer in enumerate(self.layers):
                states[place] = layer(x, states[place])
                x = states[place][0]
            logits.append(self.head(self.norm(x)))
        return torch.stack(logits, 1)


def training():
    """Return a function that takes a step and returns its loss."""
    torch.manual_seed(0)
    model, words = Recurrent(), torch.randint(0, WORDS, (ROWS, LENGTH + 1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def in_two_threads(steps: int) -> tuple[list[float], float]:
    """Train twice at once; return the losses, and the CPU time of one of their steps after the third."""
    both = [training(), training()]
    together = threading.Barrier(2)
    losses: list[list[float]] = [[], []]
    times: list[float] = []

    def work(step: Callable[[], float], own: list[float]) -> None:
        own += [step() for _ in range(3)]
        together.wait()
        start = time.thread_time()
        own += [step() for _ in range(steps)]
        times.append((time.thread_time() - start) / steps)

    threads = [threading.Thread(target=work, args=one) for one in zip(both, losses, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses[0] == losses[1]
    return losses[0], sum(times) / 2


def ample() -> Any:
    return dtrrun.budget("8GB", device="cpu")


@contextlib.contextmanager
def in_full() -> Iterator[None]:
    with ample() as session:
        session.interposer.count_only = lambda **_: None
        yield


def measure(quick: bool) -> Section:
    torch.set_num_threads(1)
    rounds, steps = (3, 2) if quick else (7, 5)
    with dtrrun.budget(None, device="cpu") as session:
        step = training()
        for _ in range(3):
            step()
    budget = int(session.report()["peak_bytes"] * SHARE)
    ways = {
        "plain": contextlib.nullcontext,
        "an empty mode": Empty,
        COUNTED: lambda: dtrrun.budget(None, device="cpu"),
        AMPLE: ample,
        FULL: in_full,
        f"{SHARE:.0%} of the peak": lambda: dtrrun.budget(budget, device="cpu"),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    expected: list[float] = []
    for _ in range(rounds):
        for way, context in ways.items():
            step = training()
            with context():
                losses = [step() for _ in range(3)]
                start = time.process_time()
                losses += [step() for _ in range(steps)]
                times[way].append((time.process_time() - start) / steps)
            expected = expected or losses
            if losses != expected:
                raise AssertionError(f"{way}: {losses} instead of {expected}")
    in_turns = {
        "two threads, plain": ways["plain"],
        "two threads, an ample budget": ample,
    }
    for _ in range(rounds):
        for way, context in in_turns.items():
            with context():
                losses, took_one = in_two_threads(steps)
            times.setdefault(way, []).append(took_one)
            if losses != expected:
                raise AssertionError(f"{way}: {losses} instead of {expected}")
    section = Section(
        "19. Steps of many small operators", TEXT, ["", "Step", "Times the plain step", "At most"]
    )
    for way, took in times.items():
        compared = "two threads, plain" if way in in_turns else "plain"
        ratios = [ours / plain for ours, plain in zip(took, times[compared], strict=True)]
        limit = AT_MOST.get(way)
        found = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        section.rows.append([way, f"{median(took) * 1e3:.1f} ms", found, f"{limit}" if limit else ""])
        if limit and median(ratios) > limit:
            section.missed.append(f"{way}: {median(ratios):.2f}, should be at most {limit}")
    return section
