"""What a step takes on this GPU, and what stalls it: `python -m tests.bench.gpu_short.times MODEL [SHARE…]`.

A model of `make bench-gpu` at its full size: plainly, counting (no budget), inside twice its peak, and
inside these shares of it, or 70 %, 50 % and the least share of the prototype. For each, the ms of the
fastest and the median of some steps, of which the host's until the last call returned; and per step, the
allocator's flushes, refusals and GB returned to the driver, dtrrun's evictions, rematerializations and
retries, and the host's ms in calls that may wait for the GPU.
"""

import gc
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import dtrrun
from dtrrun.runtime.cuda.gpu import Gpu
from dtrrun.runtime.cuda.oom_retry import Retry
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.models.task import task_of

QUICK = bool(os.environ.get("GPU_SHORT_QUICK"))
WARM, STEPS = (2, 2) if QUICK else (5, 6)
PATIENCE_SECONDS = 9.0
SHARES = (0.7, 0.5)
FURTHER = 0.02  # a share this near to one of SHARES is not measured again
MIB = 1 << 20
WATCHED = {
    Gpu: ("empty_cache", "segments", "used_and_total", "shown", "statistics"),
    Retry: ("relieve",),
}
COUNTED = ("evictions", "rematerializations", "oom_retries")


class Stalls:
    """The host's time in calls that may wait for the GPU or the driver, by name: calls, ms."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for owner, names in WATCHED.items():
            for name in names:
                self._watch(owner, name)

    def _watch(self, owner: type, name: str) -> None:
        own, call = owner.__dict__[name], getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                spent = self.spent[name]
                spent[0] += 1
                spent[1] += (time.perf_counter() - started) * 1e3

        setattr(owner, name, staticmethod(watched) if isinstance(own, staticmethod) else watched)


def steps(step: Callable[[], Any], stalls: Stalls, report: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run some steps, then time some more."""
    begun = time.perf_counter()
    for n in range(WARM):
        step()
        if n and time.perf_counter() - begun > PATIENCE_SECONDS:
            break
    torch.cuda.synchronize()
    stalls.spent.clear()
    before, reported, took, host = torch.cuda.memory_stats(), report(), [], []
    for n in range(STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - started) * 1e3)
        host.append((returned - started) * 1e3)
        if n and time.perf_counter() - begun > PATIENCE_SECONDS:
            break
    count = len(took)
    after, told = torch.cuda.memory_stats(), report()
    found: dict[str, Any] = {
        "ms": min(took),
        "median": statistics.median(took),
        "host": statistics.median(host),
        "flushes": (after["num_alloc_retries"] - before["num_alloc_retries"]) / count,
        "refusals": (after["num_ooms"] - before["num_ooms"]) / count,
        "GB unmapped": (after["reserved_bytes.all.freed"] - before["reserved_bytes.all.freed"]) / count / 1e9,
    }
    for name in COUNTED if told else ():
        found[name] = (told[name] - reported[name]) / count
    found["host's ms in"] = {
        name: f"{ms / count:.1f} ({calls / count:.1f} calls)"
        for name, (calls, ms) in stalls.spent.items()
        if ms / count > 0.05
    }
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}


def inside(label: str, budget: int | None, step: Callable[[], Any], stalls: Stalls, plain_ms: float) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        with dtrrun.budget(budget, device="cuda") as session:
            found = steps(step, stalls, session.report)
            report = session.report()
    except dtrrun.BudgetError as error:
        print(
            f"{label}: BudgetError, least {error.least_budget_bytes / 1e9:.2f} GB: {error}"[:300], flush=True
        )
        return
    said = report.get("step_slowdown") or report.get("slowdown_estimate")
    print(f"{label}: measured x{found['ms'] / plain_ms:.2f}, said x{said}", found, flush=True)
    rule = (session.rule or {}).get("heuristic")
    most = (report.get("footprint_peak_bytes") or 0) / budget if budget else 0
    notes = [warning["text"][:90] for warning in report["warnings"]]
    print(f"    rule {rule}, footprint/budget {most:.3f}, warnings {notes}", flush=True)


def main() -> None:
    name, *wanted = sys.argv[1:]
    case = BY_NAME[name]
    torch.manual_seed(0)
    stalls = Stalls()
    torch.cuda.reset_peak_memory_stats()
    step = task_of(case, "cuda", False, case.size).step
    plain = steps(step, stalls, dict)
    peak = torch.cuda.max_memory_allocated()
    print(f"{case.title}: peak {peak / 1e9:.2f} GB; plain", plain, flush=True)
    free, total = torch.cuda.mem_get_info()
    overhead = total - free - torch.cuda.memory_reserved()
    least = min(case.shares)
    shares = [float(share) for share in wanted]
    if not shares:
        shares = [*SHARES, *([least] if all(abs(least - share) > FURTHER for share in SHARES) else [])]
    inside("counting", None, step, stalls, plain["ms"])
    inside("ample", overhead + 2 * peak, step, stalls, plain["ms"])
    for share in shares:  # what dtrrun keeps free of a budget comes on top
        budget = int(overhead + max(share * peak * 1.05, share * peak + 86 * MIB))
        inside(f"{share:.0%}", budget, step, stalls, plain["ms"])


if __name__ == "__main__":
    main()
