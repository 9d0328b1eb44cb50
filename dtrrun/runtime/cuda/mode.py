"""The dispatch mode of a session on a GPU: it passes operators that use none, and detects side streams."""

from __future__ import annotations

from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.runtime.cuda.oom_retry import requested
from dtrrun.runtime.dispatch.mode import DTRMode
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.errors import BudgetError


class CudaMode(DTRMode):
    """A `DTRMode` whose GPU-specific checks come before the fast path, so they cost nothing on a CPU."""

    def __init__(self, slow_path: SlowPath, device: Any) -> None:
        super().__init__(slow_path)
        self.device = device

    def concerns(self, args: Any, kwargs: Any) -> bool:
        return self.device.gpu.touched_by(args, kwargs) is not None

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        device = self.device
        first = args[0] if args else None
        certain = type(first) is torch.Tensor and first.is_cuda and device.awake
        if not (certain or device.concerned(args, kwargs)):
            return func(*args, **(kwargs or {}))
        slow_path = self.slow_path
        try:
            if not device.gpu.on_side_stream():
                try:
                    return super().dispatch(func, types, args, kwargs)
                except RuntimeError as error:
                    operator = self.operators.get(id(func))
                    tried = getattr(error, "dtrrun_given_up", False)  # retried enough by the slow path
                    if tried or operator is None or not device.operators.forgives(operator, error):
                        raise
                    device.retry.met(error)
                    device.retry.refused = requested(str(error))
            # On a side stream, or after the fast path's operator ran out of memory.
            operator = self.operators.get(id(func))
            if operator is None:
                operator = slow_path.learn(func)
            return slow_path.run(self, operator, func, types, args, kwargs or {}, now_ns())
        except torch.OutOfMemoryError as error:
            if not isinstance(error, BudgetError):
                device.retry.met(error)
                device.retry.observers.reached_program()
            raise
