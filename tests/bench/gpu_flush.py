"""The cost of an allocator flush on this GPU (not run on one yet):

    PYTORCH_ALLOC_CONF=expandable_segments:True python -m tests.bench.gpu_flush

Compare it with the milliseconds of recomputation that `gpu_flush_counts --idea holes-4ms` pays to avoid a
flush, plus the time of the allocator snapshot that it needs to predict one.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

HANDLE = 20 << 20
TIMES = 7
GB = (0.1, 0.5, 1.0, 2.0)
BLOCKS = (300, 1000, 3000)


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the host's ms, and the result."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = run()
    return (time.perf_counter() - started) * 1e3, result


def flush(nbytes: int) -> tuple[float, float]:
    """Return the median ms to unmap that many free bytes, and to map them again."""
    torch.cuda.empty_cache()
    unmapped, mapped = [], []
    for _ in range(TIMES):
        mapped.append(timed(lambda: block(nbytes))[0])  # freed at once
        unmapped.append(timed(torch.cuda.empty_cache)[0])
    return median(unmapped), median(mapped)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 1
    kept = [block(2 << 20)]  # otherwise the address range is returned, too
    if not all(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
        print("the segments do not grow: set PYTORCH_ALLOC_CONF=expandable_segments:True", file=sys.stderr)
        return 1
    flush(HANDLE)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; medians of {TIMES}")
    for gb in GB:
        nbytes = int(gb * 1e9) // HANDLE * HANDLE
        unmap, map_again = flush(nbytes)
        each = (unmap + map_again) * 1e3 / (nbytes // HANDLE)
        print(
            f"{gb:4.1f} GB: unmapped in {unmap:.2f} ms, mapped in {map_again:.2f} ms, {each:.0f} µs a handle"
        )
    for blocks in BLOCKS:
        while len(kept) < blocks:
            kept.append(block(2 << 20))
        snapshot = median(timed(torch.cuda.memory_snapshot)[0] for _ in range(TIMES))
        print(f"{blocks} blocks: a snapshot takes {snapshot:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
