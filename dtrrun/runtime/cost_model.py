"""A fixed cost model (`--cost model`): what an operator would cost, from its bytes and FLOPs alone.

Decisions then do not depend on timings, so that two runs evict alike. FLOPs come from the formulas of
PyTorch's own `flop_counter`; operators that have none there are bound by memory.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils.flop_counter import flop_registry

LAUNCH_NS = 2_000
BYTES_PER_NS = 10  # 10 GB/s
FLOPS_PER_NS = 50  # 50 GFLOP/s: of one modest core; only ratios matter


def modelled_ns(func: Any, args: Any, kwargs: dict[str, Any], result: Any, nbytes: int) -> int:
    """Nanoseconds for one call that reads and writes `nbytes` in all."""
    flops = 0
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        with suppress(Exception):  # a formula that does not know these arguments
            flops = int(formula(*args, **kwargs, out_val=result))
    return LAUNCH_NS + nbytes // BYTES_PER_NS + flops // FLOPS_PER_NS
