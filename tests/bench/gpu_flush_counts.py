"""How often a GPU's allocator would flush, on a model of it: `python -m tests.bench.gpu_flush_counts`.

Training steps of the models of `make bench-gpu`, at their size, over a model of a GPU that computes nothing
(`tests/unit/fake_gpu.py`). Each flush is a wait for the GPU and an unmapping of all that is free, by handles
of 20 MiB; what that takes, only a GPU can tell (`gpu_flush`). Costs are the model's (bytes and FLOPs).
`--idea`: ways to have fewer flushes (`gpu_flush_ideas`).
"""

import argparse
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dtrrun
from dtrrun.runtime.cuda.budget import GUARD_SHARE, LEAST_GUARD, LEAST_SLACK, MIB
from dtrrun.runtime.execute import Executor
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.models.task import task_of
from tests.bench.gpu_flush_ideas import IDEAS, Idea
from tests.unit.fake_gpu import REAL, Allocator, FakeGpu, fake_session

CONTEXT = 300 * MIB
SETTLED = 2  # steps left out: the first ones allocate gradients and optimizer state
SHORTER: dict[str, dict[str, int]] = {
    "resnet1202": {"n": 18, "batch_size": 640},
    "lstm": {"length": 64, "batch_size": 2048},
    "treelstm": {"depth": 6, "batch_size": 5120},
    "unrolled_gan": {"unroll": 8, "batch_size": 4096},
}
"""Fewer layers, time steps or nodes, and more in each."""

Step = Callable[[], Any]


def model(name: str) -> Step:
    if name == "lengths":
        return lengths()
    case = BY_NAME[name]
    return task_of(case, "cpu", False, case.size | SHORTER.get(name, {})).step


def lengths() -> Step:
    """Convolutions over sequences, of another length in each step."""
    net = nn.Sequential(*[part for _ in range(16) for part in (nn.Conv1d(64, 64, 3, padding=1), nn.GELU())])
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    chosen = random.Random(0)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.randn(64, 64, chosen.randrange(4000, 12000))).square().mean().backward()
        optimizer.step()

    return step


PROGRAMS = (*BY_NAME, "lengths")


def hollow() -> FakeGpu:
    return FakeGpu(CONTEXT, Allocator(**REAL), computes=False)


def train(
    make: Callable[[], Step], budget: int | None, steps: int, idea: Idea | None = None, gpu: Any = None
) -> tuple[int, list[list[float]]]:
    """Return the peak of the tensors, and the counts by step."""
    gpu = gpu or hollow()
    recomputed = [0]
    execute = Executor.execute

    def counted(self: Any, operation: Any, taken: Any) -> Any:
        recomputed[0] += operation.signature.cost
        return execute(self, operation, taken)

    def copy(self: Any, source: Any) -> Any:  # without copying content
        return self._memory.allocate(source.nbytes(), source.device)

    rows, before = [], [0.0] * 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "execute", counted)
        patch.setattr(Executor, "_copy", copy)
        with fake_session(patch, budget, gpu=gpu, cost="model") as (session, _):
            if idea is not None:
                idea(session, gpu.allocator, patch)
            torch.manual_seed(0)
            step = make()
            for _ in range(steps):
                step()
                report = session.report()
                now = [
                    gpu.allocator.flushes,
                    gpu.allocator.unmapped / 1e9,
                    report["oom_retries"],
                    report["evictions"],
                    recomputed[0] / 1e6,
                    session.ledger.clock / 1e6,
                ]
                rows.append([after - one for after, one in zip(now, before, strict=True)])
                before = now
    return report["peak_bytes"], rows


def line(rows: list[list[float]]) -> str:
    """Return a line with the means over these steps."""
    flushes, unmapped, retries, evictions, again, clock = (
        sum(column) / len(rows) for column in zip(*rows, strict=True)
    )
    return (
        f"{flushes:7.1f} flushes a step, {unmapped:5.2f} GB unmapped; {evictions:6.1f} evictions, "
        f"{again:6.2f} ms recomputed of {clock - again:6.1f} ({again / (clock - again):.1%}), "
        f"{retries:.1f} retries"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_flush_counts", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--share", type=float, action="append", help="of the peak; 0.7 and 0.5 if not given")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--idea", choices=IDEAS, action="append", help="`none` if not given")
    args = parser.parse_args()
    if unknown := set(args.programs).difference(PROGRAMS):
        parser.error(f"no such program: {', '.join(sorted(unknown))} (there are {', '.join(PROGRAMS)})")
    if args.steps <= SETTLED:
        parser.error(f"--steps: more than {SETTLED}, which are not counted")
    warnings.simplefilter("ignore")
    for name in args.programs or PROGRAMS:
        make = partial(model, name)
        peak, _ = train(make, None, 1 if name != "lengths" else args.steps)
        for share in args.share or (0.7, 0.5):
            inside = int(share * peak) + CONTEXT
            budget = inside + LEAST_SLACK + max(LEAST_GUARD, inside // GUARD_SHARE)
            for idea in args.idea or ("none",):
                print(f"{name:12} {share:.2f} {idea:10}", end=" ", flush=True)
                try:
                    print(line(train(make, budget, args.steps, IDEAS[idea])[1][SETTLED:]), flush=True)
                except dtrrun.BudgetError as error:
                    print(error)


if __name__ == "__main__":
    main()
