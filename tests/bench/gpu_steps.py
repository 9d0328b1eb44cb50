"""Whether steps repeat on a GPU: `python -m tests.bench.gpu_steps [MODEL…] [--share S…] [--steps N]`.

The models of `make bench-gpu` at their full size, inside shares of their peak, with the costs of `--cost
model`. Printed, per step from the fifth on: the allocator's flushes and refusals, waits for a stream (only on
the stand-in), searches for neighbours to evict, with the processor's µs for each, evictions,
rematerializations, operators of backward passes that are only counted, whether these are the same in all of
these steps, how long the processor takes for the fastest step and for a plain one, and how many times as
long. Operators of backward passes are counted as in a session with measured costs; --full: they are not.

    python -m tests.hollow --idle python -m tests.bench.gpu_steps unet --share 0.7 0.5
"""

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the launcher does

import torch

import dtrrun
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.models.task import task_of

MIB = 1 << 20
FIRST = 5
HEADERS = (
    "Model",
    "Share",
    "Flushes",
    "Refusals",
    "Waits",
    "Searches",
    "µs each",
    "Evictions",
    "Again",
    "Counted",
    "Alike",
    "ms",
    "plain",
    "times",
)


def waits() -> int:
    """Return how often the host has waited for a stream so far; 0 on a real GPU, which does not tell."""
    count = getattr(ctypes.CDLL(None), "hollow_waits", None)
    return int(count()) if count is not None else 0


class Meter:
    """Counts what the steps of a session do."""

    def __init__(self, session: Any) -> None:
        self.session, self.counted = session, 0
        history = session.dtr.history
        end_step = history.end_step

        def ended() -> None:
            session.ledger.collect_dead()
            self.counted += session.ledger.operators_counted
            end_step()

        history.end_step = ended

    def figures(self) -> list[float]:
        stats, report, flushes = (
            torch.cuda.memory_stats(),
            self.session.report(),
            self.session.device.retry.flushes,
        )
        return [
            stats["num_alloc_retries"],
            stats["num_ooms"],
            waits(),
            flushes.searches,
            flushes.processor_ns,
            report["evictions"],
            report["rematerializations"],
            self.counted,
        ]


def inside(step: Callable[[], Any], budget: int, steps: int, full: bool, plain: float) -> list[str]:
    gc.collect()
    torch.cuda.empty_cache()
    found, took = [], []
    try:
        with dtrrun.budget(budget, device="cuda", cost="model") as session:
            session.interposer.counts_backward = not full
            meter = Meter(session)
            for _ in range(steps):
                before = meter.figures()
                took.append(timed(step))
                found.append([after - one for one, after in zip(before, meter.figures(), strict=True)])
    except dtrrun.BudgetError as error:
        return [f"needs {error.least_budget_bytes / 1e9:.1f} GB"] + ["–"] * 11
    steady = found[FIRST - 1 :]
    columns = [[step[place] for step in steady] for place in range(len(found[0]))]
    each = 1e-3 * sum(columns[4]) / max(sum(columns[3]), 1)
    alike = all(one[5:] == steady[0][5:] for one in steady)
    shown = [span(one) for one in columns]
    shown[4] = f"{each:.0f}"
    ms = min(took[FIRST - 1 :])
    return [*shown, "yes" if alike else "no", f"{ms:.1f}", f"{plain:.1f}", f"{ms / plain:.2f}"]


def timed(step: Callable[[], Any]) -> float:
    """Return the processor's ms."""
    began = time.process_time()
    step()
    return (time.process_time() - began) * 1e3


def span(numbers: list[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:.0f}" if low == high else f"{low:.0f}–{high:.0f}"


def measured(name: str, args: argparse.Namespace) -> None:
    case = BY_NAME[name]
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    step = task_of(case, "cuda", False, case.size).step
    step()
    plain = min(timed(step) for _ in range(3))
    peak = torch.cuda.max_memory_allocated()
    free, total = torch.cuda.mem_get_info()
    overhead = total - free - torch.cuda.memory_reserved()
    for share in args.share:  # what dtrrun keeps free of a budget comes on top
        budget = int(overhead + max(share * peak * 1.05, share * peak + 86 * MIB))
        found = inside(step, budget, args.steps, args.full, plain)
        print("|", " | ".join([case.title.split(",")[0], f"{share:.0%}", *found]), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_steps", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all if none is given")
    parser.add_argument("--share", type=float, nargs="+", default=[0.7, 0.5])
    parser.add_argument("--steps", type=int, default=10, help=f"at least {FIRST}")
    parser.add_argument("--full", action="store_true", help="no operator is only counted")
    args = parser.parse_args()
    for row in (HEADERS, ["---", *["---:"] * (len(HEADERS) - 1)]):
        print("|", " | ".join(row), "|")
    for name in args.models or BY_NAME:
        measured(name, args)


if __name__ == "__main__":
    main()
