"""Two hundred training steps: the ledger, the process's memory and the time of a step do not grow."""

import gc
import time
from statistics import median

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import dtrrun
from tests.bench.section import Section

STEPS, WARM = 200, 40

TEXT = f"""\
A convnet with batch normalization under Adam runs {STEPS} steps in one process, inside half its peak. The
program keeps every loss, and a running average that it changes in place, as real programs do. The table
compares the states after {WARM} steps and at the end, and the median processor times of the {WARM} steps
before each. Storages are those in the ledger, not counting the losses that the program keeps. Objects are all
those known to Python's garbage collector, and the native nodes of the graph, not counting the same losses."""


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers, channels = [], 1
        for width in (16, 16, 32, 32, 32, 32):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        self.model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.images, self.labels = torch.randn(32, 1, 24, 24), torch.randint(10, (32,))
        self.losses: list[torch.Tensor] = []
        self.average = torch.zeros(())

    def step(self) -> float:
        start = time.process_time()
        loss = F.cross_entropy(self.model(self.images), self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        self.average.mul_(0.9).add_(self.losses[-1], alpha=0.1)
        return time.process_time() - start


def peak_of_a_step() -> int:
    with dtrrun.budget("1TB", device="cpu") as session:
        training = Training()
        for _ in range(3):
            training.step()
        return session.report()["peak_bytes"]


def measure(quick: bool) -> Section:
    torch.set_num_threads(1)
    budget = f"{peak_of_a_step() // 2}B"
    with dtrrun.budget(budget, device="cpu") as session:
        training = Training()
        states, times = [], []
        for step in range(1, STEPS + 1):
            times.append(training.step())
            if step in (WARM, STEPS):
                gc.collect()
                kept = len(training.losses)
                nodes = () if session._native is None else session._native.living()
                states.append(
                    {
                        "Storages": session.report()["live_storages"] - kept,
                        "Objects": len(gc.get_objects()) + sum(nodes) - kept,
                        "Resident set, kB": psutil.Process().memory_info().rss // 1000,
                        "Step, µs": round(median(times[-WARM:]) * 1e6),
                    }
                )
        evictions = session.report()["evictions"]
    before, after = states
    at_most = {"Storages": 1.0, "Objects": 1.01, "Resident set, kB": 1.03, "Step, µs": 1.15}
    section = Section("5. Two hundred steps", TEXT, ["", f"After {WARM} steps", f"After {STEPS}", "At most"])
    for name, limit in at_most.items():
        section.rows.append([name, f"{before[name]:,}", f"{after[name]:,}", f"{limit:.0%}"])
        if after[name] > limit * before[name]:
            section.missed.append(f"{name}: {before[name]:,} grew to {after[name]:,}")
    if evictions < STEPS:
        section.missed.append(f"only {evictions} evictions: the budget did not bind")
    return section
