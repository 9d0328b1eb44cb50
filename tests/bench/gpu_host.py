"""What a step takes on the host: `python -m tests.hollow --idle python -m tests.bench.gpu_host [MODEL…]`.

The models of `make bench-gpu` at their size, on a GPU that computes nothing, so that a step's time is that of
Python, of PyTorch's dispatcher and of dtrrun. A real GPU hides it where it is busy for longer. Printed: the
operators of a step, ms of the fastest step plainly, under an empty dispatch mode (without which nobody sees
operators from Python), under dtrrun without a budget and inside a share of the peak; and per step, recomputed
operators and flushes of the allocator. Costs are the model's (bytes and FLOPs).
"""

import argparse
import gc
import os
import time
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the launcher does

import torch

import dtrrun
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.models.task import task_of
from tests.bench.overhead import Empty

MIB = 1 << 20
HEADERS = ["Model", "Operators", "Plain", "Mode", "Counting", "Inside", "Recomputed", "Flushes"]
GUARD_AND_SLACK = 0.05  # of the budget, at least 86 MiB: so much more than the share it has to be


class Counter(Empty):
    count = 0

    def __torch_dispatch__(self, *call: Any) -> Any:
        self.count += 1
        return super().__torch_dispatch__(*call)


def timed(step: Any, rounds: int) -> float:
    """ms of the fastest of the steps after the first."""
    step()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begun) * 1e3)
    return min(found)


def measured(name: str, share: float, rounds: int) -> list[str]:
    case = BY_NAME[name]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    step = task_of(case, "cuda", False, case.size).step
    plain = timed(step, rounds)
    peak = torch.cuda.max_memory_allocated()
    with Counter() as counter:
        step()
    with Empty():
        empty = timed(step, rounds)
    with dtrrun.budget(None, device="cuda", cost="model"):
        counting = timed(step, rounds)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    overhead = total - free - torch.cuda.memory_reserved()
    budget = int(overhead + max(share * peak * (1 + GUARD_AND_SLACK), share * peak + 86 * MIB))
    flushes = torch.cuda.memory_stats()["num_alloc_retries"]
    try:
        with dtrrun.budget(budget, device="cuda", cost="model") as session:
            inside = timed(step, rounds)
            report = session.report()
        again = report["rematerializations"] / (rounds + 1)
        flushes = torch.cuda.memory_stats()["num_alloc_retries"] - flushes
        last = [shown(inside), f"{again:.0f}", f"{flushes / (rounds + 1):.1f}"]
    except dtrrun.BudgetError as error:
        last = [f"needs {error.least_budget_bytes / 1e9:.1f} GB", "–", "–"]
    return [case.title, f"{counter.count}", shown(plain), shown(empty), shown(counting), *last]


def shown(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 20 else f"{ms:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_host", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all if none is given")
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    for row in (HEADERS, ["---"] + ["---:"] * (len(HEADERS) - 1)):
        print("|", " | ".join(row), "|")
    for name in args.models or BY_NAME:
        print("|", " | ".join(measured(name, args.share, args.rounds)), "|", flush=True)


if __name__ == "__main__":
    main()
