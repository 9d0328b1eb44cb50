"""The dispatch mode of a session on a GPU: it lets pass what touches none, and looks out for side streams."""

from __future__ import annotations

from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.runtime.careful import Careful
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.mode import DTRMode
from dtrrun.runtime.relief import requested


class CudaMode(DTRMode):
    """As `DTRMode`; what is the GPU's own comes before the short cut, so that the CPU has none of it."""

    def __init__(self, careful: Careful, device: Any) -> None:
        super().__init__(careful)
        self.device = device

    def concerns(self, args: Any, kwargs: Any) -> bool:
        return self.device.gpu.touched_by(args, kwargs) is not None

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        device = self.device
        first = args[0] if args else None
        if type(first) is not torch.Tensor or not first.is_cuda or not device.awake:  # else all is said
            touched = device.gpu.touched_by(args, kwargs)
            if touched is None or touched.type != device.type:
                if touched is None or not device.awake:
                    return func(*args, **(kwargs or {}))
            elif not device.awake:
                if not device.gpu.initialized():
                    return func(*args, **(kwargs or {}))
                device.wake(touched)
        careful = self.careful
        try:
            if not device.gpu.on_side_stream():
                try:
                    return super().dispatch(func, types, args, kwargs)
                except RuntimeError as error:
                    operator = self.operators.get(func)
                    if operator is None or not device.forgives(operator, error):
                        raise
                    device.relief.met(error)
                    device.relief.refused = requested(str(error))
            # On a side stream, or the short cut's operator ran out of memory.
            operator = self.operators.get(func)
            if operator is None:
                operator = careful.learn(func)
            return careful.run(self, operator, func, types, args, kwargs or {}, now_ns())
        except torch.OutOfMemoryError as error:
            if not isinstance(error, BudgetError):
                device.relief.met(error)
            raise
