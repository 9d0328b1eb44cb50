"""The native interposer of a session on a GPU: operators that use no GPU pass through."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns as now_ns
from types import ModuleType
from typing import Any

import torch

from dtrrun.runtime import rng
from dtrrun.runtime.cost_model import GPU as GPU_RATES
from dtrrun.runtime.cuda.oom_retry import requested
from dtrrun.runtime.dispatch.interposer import CPU, NO_KEYWORDS, Interposer
from dtrrun.runtime.dispatch.slow_path import Reasons, SlowPath
from dtrrun.runtime.dispatch.threads import joins
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.operators import Operator


class CudaInterposer(Interposer):
    """An `Interposer` that wakes the session and handles out-of-memory errors of the fast path."""

    def __init__(
        self,
        native: ModuleType,
        slow_path: SlowPath,
        device: Any,
        noticed: Callable[[], None],
        alert: Callable[[str], None],
    ) -> None:
        super().__init__(native, slow_path, noticed, alert)
        self.device = device
        self.device_type = device.type
        self.times = device.operators.times
        self.prices = True  # until an event says more

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        entered = now_ns()
        device, slow_path = self.device, self.slow_path
        if not device.concerned(args, kwargs):
            return self.native.proceed()
        if self.place is CPU:
            self.place = torch.device(device.type, device.gpu.index)
            self.native.bind(device.gpu.index)
        operator = slow_path.operators.get(id(func)) or slow_path.learn(func)
        if get_ident() != slow_path.home_thread:
            self.join()
        try:
            return slow_path.run(operator, func, args, kwargs or NO_KEYWORDS, entered)
        except torch.OutOfMemoryError as error:
            self._met(error)
            raise

    # -- for the fast path -----------------------------------------------------------------------

    rates = GPU_RATES

    def metering(self) -> int:
        """Return how the memory that first calls need is measured: 0 for not at all, 1 by the blocks of which
        the allocator tells, or 2 by its statistics."""
        operators = self.device.operators
        return 0 if operators.blind else 1 if operators.tells_of_blocks() else 2

    def statistics(self) -> Any:
        """Return what `taken` needs from before a call."""
        return self.device.operators.state()

    def taken(self, before: Any) -> int:
        """Return the bytes that a call has used at its peak."""
        return int(self.device.operators.taken(before))

    def occupy(self) -> None:
        """Give the GPU some work that takes longer than the launch of an operator."""
        self.device.gpu.occupy()

    def loaded(self) -> None:
        """Note that a call may have loaded kernels, or a library."""
        self.device.operators.loaded()

    def may_replay_again(self, operator: Operator, error: Any) -> bool:
        """Return whether the slow path may repeat a replay that raised `error`, for lack of memory."""
        device = self.device
        if not device.operators.can_retry(operator, error, True):
            return False
        device.retry.met(error)
        device.retry.refused = requested(str(error))
        return True

    @staticmethod
    def join() -> None:
        """Note that this thread, which is not the training thread, is about to use the GPU."""
        joins()

    def overlap(self) -> None:
        """Note that operators of two threads overlap: from now on all take the slow path, which locks."""
        self.slow_path.shared = True
        self.share(self.slow_path.reasons)

    def share(self, reasons: Reasons) -> None:
        self.leave_fast_path(reasons)  # threads take turns only on the CPU

    def can_retry(self, operator: Operator | None, drawn: Any, error: Any) -> bool:
        """Return whether an operator that raised `error` has not begun to write, and will run again.

        operator: None if it may have begun to write. drawn: the generators that it draws from and their
        previous states, which are restored; or None.
        """
        device = self.device
        if operator is None or not device.operators.can_retry(operator, error, drawn is not None):
            if operator is not None:
                device.retry.refuse(error, operator.name)
            self._met(error)
            return False
        if drawn is not None:
            rng.put_back(drawn)
        device.retry.met(error)
        device.retry.refused = requested(str(error))
        return True

    def _met(self, error: BaseException) -> None:
        if isinstance(error, torch.OutOfMemoryError) and not isinstance(error, BudgetError):
            self.device.retry.met(error)
            self.device.retry.observers.reached_program()

    def capture(self, nbytes: int, generator: torch.Generator | None) -> Any:
        """Return the state of the generator from which an operator is about to draw `nbytes` bytes.

        generator: the one passed to the operator.
        """
        return rng.capture(self.place, generator, nbytes)
