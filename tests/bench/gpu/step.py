"""Trains a model for some steps: `python -m tests.bench.gpu.step MODEL …`, plainly or as dtrrun's target.

Writes, as JSON: the time of every step, the losses' bits, a fingerprint of all parameters, and the peaks of
PyTorch's allocator. Everything random is from one seed, so that two runs are to have the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.models.task import task_of

WARM = 15.0
"""Seconds of steps after which all is warm: what costs more than that has no lack of operators."""

NO_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")


def main() -> int:
    args = arguments()
    case = BY_NAME[args.model]
    lacking: set[str] = set()
    if args.deterministic:
        collect(lacking)
        # Warn only: PyTorch still uses the deterministic kernels that exist, and the rest is reported.
        torch.use_deterministic_algorithms(True, warn_only=True)
    if args.device == "cuda":
        torch.cuda.init()
        total = torch.cuda.get_device_properties(0).total_memory
        if args.allocator_cap:
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.allocator_cap / total))

    torch.manual_seed(0)
    size = (case.tiny if args.tiny else case.size) | args.size
    task = task_of(case, args.device, args.checkpoint, size)
    warm_up_ms: list[float] = []
    steps_ms: list[float] = []
    losses = []
    while len(steps_ms) < args.steps:
        times = steps_ms if warm(warm_up_ms, args.warm_up) else warm_up_ms
        synchronize(args.device)
        begun = time.perf_counter()
        loss = task.step()
        synchronize(args.device)
        times.append((time.perf_counter() - begun) * 1e3)
        losses.append(float(loss).hex())
    result = {
        "steps_ms": steps_ms,
        "warm_up_ms": warm_up_ms,
        "losses": losses,
        "parameters": fingerprint(task.modules) if args.deterministic else None,
        "no_deterministic_kernel": sorted(lacking),
        **memory(args.device),
    }
    Path(args.json).write_text(json.dumps(result))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.step", description=__doc__)
    parser.add_argument("model", choices=BY_NAME, metavar="MODEL")
    parser.add_argument("--json", required=True, metavar="PATH")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a size for tests")
    parser.add_argument("--size", type=json.loads, default={}, metavar="JSON", help="in place of the case's")
    parser.add_argument("--warm-up", type=int, default=5, metavar="STEPS", help="before, at most")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint", action="store_true", help="torch.utils.checkpoint for each block")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--allocator-cap", type=int, default=0, metavar="BYTES")
    return parser.parse_args()


def warm(times_ms: list[float], most: int) -> bool:
    """Return whether the warm-up is enough; at least two, since the first step begins without gradients."""
    return len(times_ms) >= most or (len(times_ms) >= 2 and sum(times_ms) >= WARM * 1e3)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def memory(device: str) -> dict[str, int]:
    """Return the run's peaks, in bytes. `in_use` is the whole device's current use, others included."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "reserved_now": torch.cuda.memory_reserved(),
        "flushes": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "in_use": total - free,
    }


def fingerprint(modules: tuple[torch.nn.Module, ...]) -> str:
    sha = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            sha.update(name.encode())
            sha.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def collect(names: set[str]) -> None:
    """Collect the operators without a deterministic kernel; other warnings are shown as usual."""
    show = warnings.showwarning

    def showwarning(message: Any, *others: Any, **more: Any) -> None:
        if found := NO_DETERMINISTIC.search(str(message)):
            names.add(found[1])
        else:
            show(message, *others, **more)

    warnings.showwarning = showwarning


if __name__ == "__main__":
    sys.exit(main())
