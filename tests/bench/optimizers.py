"""The cost of an optimizer's step on tiny tensors inside a session, where all of it is the host's work."""

import contextlib
import time
from statistics import median

import torch

import dtrrun
from tests.bench.section import Section

AT_MOST = 3.0

TEXT = """\
The table shows steps of an optimizer on tensors of 8 × 8, without dtrrun and inside `dtrrun.budget("1GB")`,
in turn in one process. The times are medians of the rounds. The tensors are so small that a step consists
only of the host's work, as on a GPU that waits for the host. On a CPU, AdamW with `foreach` reads the step
count of each tensor twice, with one operator each, which it does not do on a GPU."""

OPTIMIZERS = {
    "SGD, momentum, `foreach`": lambda ps: torch.optim.SGD(ps, 1e-3, momentum=0.9, foreach=True),
    "AdamW, `foreach`": lambda ps: torch.optim.AdamW(ps, 1e-3, foreach=True),
    "AdamW, `fused`": lambda ps: torch.optim.AdamW(ps, 1e-3, fused=True),
    "AdamW, one by one": lambda ps: torch.optim.AdamW(ps, 1e-3, foreach=False),
}
BY_LISTS = ("foreach", "fused")
COUNTS = (150, 1200)  # tensors: about a GPT-2's, a third of a ResNet-1202's


def steps_of(make, count: int):
    """Return `step` of an optimizer whose gradients and state exist."""
    parameters = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(8, 8)
    optimizer = make(parameters)
    for _ in range(3):
        optimizer.step()
    return optimizer.step


def seconds(step, turns: int) -> float:
    start = time.perf_counter()
    for _ in range(turns):
        step()
    return (time.perf_counter() - start) / turns


def measure(quick: bool) -> Section:
    torch.set_num_threads(1)
    rounds, turns = (3, 3) if quick else (9, 20)
    section = Section(
        "17. Optimizer steps", TEXT, ["Optimizer", "Tensors", "Plain", "dtrrun", "Times as long"]
    )
    for name, make in OPTIMIZERS.items():
        for count in COUNTS:
            samples: dict[str, list[float]] = {"plain": [], "dtrrun": []}
            for _ in range(rounds):
                for kind, times in samples.items():
                    with dtrrun.budget("1GB", device="cpu") if kind == "dtrrun" else contextlib.nullcontext():
                        times.append(seconds(steps_of(make, count), max(turns * COUNTS[0] // count, 2)))
            plain, ours = (median(times) for times in samples.values())
            cells = [f"{value * 1e3:.2f} ms" for value in (plain, ours)]
            section.rows.append([name, str(count), *cells, f"{ours / plain:.2f}"])
            if any(way in name for way in BY_LISTS) and ours / plain > AT_MOST:
                section.missed.append(f"{name}, {count}: {ours / plain:.2f}, should be at most {AT_MOST}")
    return section
