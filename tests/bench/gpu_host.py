"""What a step takes: `python -m tests.bench.gpu_host [MODEL…]`, each of the models in one process.

The models of `make bench-gpu` at their size. Printed: the operators of a step, ms of the fastest step
plainly, under an empty dispatch mode (without which nobody sees operators from Python), under dtrrun without
a budget and inside shares of the peak; and per step there, recomputed operators and flushes of the allocator.

On a GPU that computes nothing (`python -m tests.hollow --idle python -m tests.bench.gpu_host --cost model`),
a step's time is that of Python, of PyTorch's dispatcher and of dtrrun. A real GPU hides it where it is busy
for longer.
"""

import argparse
import gc
import os
import time
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the launcher does

import torch

import dtrrun
from dtrrun.runtime.cuda.budget import Accounts
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.models.task import task_of
from tests.bench.overhead import Empty

MIB = 1 << 20
HEADERS = ["Model", "Operators", "Plain", "Mode", "Counting", "Inside", "ms", "Recomputed", "Flushes"]
GUARD_AND_SLACK = 0.05  # of the budget, at least 86 MiB: added to the share


class Counter(Empty):
    count = 0

    def __torch_dispatch__(self, *call: Any) -> Any:
        self.count += 1
        return super().__torch_dispatch__(*call)


def timed(step: Any, rounds: int) -> float:
    """Return the ms of the fastest step after the first."""
    step()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begun) * 1e3)
    return min(found)


def measured(name: str, args: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table, one for each share."""
    case = BY_NAME[name]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    step = task_of(case, "cuda", False, case.size).step
    plain = timed(step, args.rounds)
    peak = torch.cuda.max_memory_allocated()
    with Counter() as counter:
        step()
    with Empty():
        empty = timed(step, args.rounds)
    with dtrrun.budget(None, device="cuda", cost=args.cost):
        counting = timed(step, args.rounds)
    first = [case.title, f"{counter.count}", shown(plain), shown(empty), shown(counting)]
    rows = []
    for share in args.share:
        rows.append([*first, f"{share:.0%}", *inside(step, int(share * peak), args)])
        first = [""] * len(first)
    return rows


def inside(step: Any, nbytes: int, args: argparse.Namespace) -> list[str]:
    """Return the ms of a step with `nbytes` for tensors, and recomputed operators and flushes per step."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    overhead = total - free - torch.cuda.memory_reserved()
    budget = int(overhead + max(nbytes * (1 + GUARD_AND_SLACK), nbytes + 86 * MIB))
    flushes = torch.cuda.memory_stats()["num_alloc_retries"]
    try:
        with dtrrun.budget(budget, device="cuda", cost=args.cost) as session:
            ms = timed(step, args.rounds)
            report = session.report()
    except dtrrun.BudgetError as error:
        return [f"needs {error.least_budget_bytes / 1e9:.1f} GB", "–", "–"]
    again = report["rematerializations"] / (args.rounds + 1)
    flushes = torch.cuda.memory_stats()["num_alloc_retries"] - flushes
    return [shown(ms), f"{again:.0f}", f"{flushes / (args.rounds + 1):.1f}"]


def shown(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 20 else f"{ms:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_host", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all if none is given")
    parser.add_argument("--share", type=float, nargs="+", default=[0.6])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cost", choices=("measured", "model"), default="measured")
    parser.add_argument("--slack", type=float, help="keep this share of what tensors may take free")
    args = parser.parse_args()
    if args.slack:
        least = Accounts.slack.fget
        Accounts.slack = property(lambda self: max(least(self), int(args.slack * (self.cap or 0))))
    for row in (HEADERS, ["---"] + ["---:"] * (len(HEADERS) - 1)):
        print("|", " | ".join(row), "|")
    for name in args.models or BY_NAME:
        for row in measured(name, args):
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
