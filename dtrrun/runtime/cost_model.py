"""A fixed cost model (`--cost model`): an operator's cost from its bytes and FLOPs alone.

Decisions then do not depend on timings, so two runs evict alike. FLOPs come from PyTorch's `flop_counter`;
operators without a formula there are treated as memory-bound.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils.flop_counter import flop_registry

CPU = 2_000, 10, 50  # ns per launch, bytes per ns, FLOPs per ns: 10 GB/s and 50 GFLOP/s, one modest core
GPU = 5_000, 1_000, 50_000  # 1 TB/s and 50 TFLOP/s; only ratios matter


def rates_of(device_type: str) -> tuple[int, int, int]:
    """Return the rates of the device that a budget is on."""
    return CPU if device_type == "cpu" else GPU


def modelled_ns(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    result: Any,
    nbytes: int,
    rates: tuple[int, int, int] = CPU,
) -> int:
    """Return the nanoseconds of one call that reads and writes `nbytes` in total."""
    launch_ns, bytes_per_ns, flops_per_ns = rates
    flops = flops_of(func, args, kwargs, result)
    return launch_ns + nbytes // bytes_per_ns + flops // flops_per_ns


def has_formula(func: Any) -> bool:
    """Return whether PyTorch can count an operator's FLOPs."""
    return getattr(func, "_overloadpacket", None) in flop_registry


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of one call, or 0 if unknown."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        with suppress(Exception):  # the formula may not support these arguments
            return int(formula(*args, **kwargs, out_val=result))
    return 0
