"""Costs by signature on this GPU: `python -m tests.bench.gpu_short.signatures [MODEL…]`; a file in OUT.

For each operator of a plain step and the sizes of its inputs: how often it was called, the time of its
kernels (PyTorch's profiler), and its workspace, which is what it had allocated at most beyond its results. A
stand-in for this GPU can keep time by this file. Printed: the same times by operator beside the costs that
dtrrun has measured by events in its first calls, which is what its choices rest on.
"""

import gc
import gzip
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import dtrrun
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.models.task import task_of

MODELS = ("unet", "densenet121", "transformer", "gpt2", "inception_v4", "lstm", "unrolled_gan", "resnet1202")
MOST_PRINTED = 16
WORKSPACES_FROM = 1 << 20


class Workspaces(TorchDispatchMode):
    """Notes what each operator has allocated at most beyond its results, by name and sizes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.cuda.reset_peak_memory_stats()
        result = operator(*args, **(kwargs or {}))
        stats = torch.cuda.memory_stats()
        beyond = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
        if beyond >= WORKSPACES_FROM:
            sizes = [list(x.shape) for x in args if isinstance(x, torch.Tensor)]
            key = f"{operator} {sizes}"
            self.found[key] = max(self.found.get(key, 0), beyond)
        return result


def measured(name: str) -> dict[str, Any]:
    case = BY_NAME[name]
    torch.manual_seed(0)
    step = task_of(case, "cuda", False, case.size).step
    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    rows, by_operator = [], defaultdict(lambda: [0, 0.0])
    for event in profiler.key_averages(group_by_input_shape=True):
        if event.self_device_time_total and event.key.startswith("aten::"):
            rows.append([event.key, event.input_shapes, event.count, round(event.self_device_time_total, 1)])
            total = by_operator[event.key.removeprefix("aten::")]
            total[0] += event.count
            total[1] += event.self_device_time_total / 1e3
    with Workspaces() as workspaces:
        step()
    costs = compared(name, step, by_operator)
    return {"operators": rows, "workspaces": workspaces.found, "costs": costs}


def compared(name: str, step: Any, kernels: dict[str, list[float]]) -> list[list[Any]]:
    """Print dtrrun's costs by operator beside the profiler's.

    Returns for each signature the operator, its tensors' geometries, its cost in ns, whether that was
    measured, and the bytes of its results and workspace.
    """
    costs: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    with dtrrun.budget(None, device="cuda") as session:
        for _ in range(6):
            step()
            torch.cuda.synchronize()
        signatures = session.callbacks.signatures.all()
        rows = [
            [found.operator.name, repr(found.geometries), found.cost, found.timed, found.output_bytes]
            for found in signatures
        ]
        for signature in signatures:
            cost = costs[signature.operator.name.removeprefix("aten.")]
            cost[0] += 1
            cost[1] += signature.cost / 1e6
            cost[2] += signature.timed
    print(f"{name}: signatures, the sum of their costs (ms), timed | the profiler's calls, ms", flush=True)
    for operator, (count, ms, timed) in sorted(costs.items(), key=lambda item: -item[1][1])[:MOST_PRINTED]:
        calls, total = kernels.get(operator, (0, 0.0))
        print(f"    {operator:44} {count:5} {ms:9.2f} {timed:5} | {calls:6} {total:9.2f}", flush=True)
    return rows


def main() -> None:
    begun, found = time.monotonic(), {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    out = Path(os.environ.get("OUT", ".")) / "signatures.json.gz"
    for name in sys.argv[1:] or MODELS:
        gc.collect()
        torch.cuda.empty_cache()
        found[name] = measured(name)
        with gzip.open(out, "wt") as file:  # so that nothing is lost if this one is ended
            json.dump(found, file)
        print(f"    after {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
