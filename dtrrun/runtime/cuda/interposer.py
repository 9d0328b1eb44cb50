"""The native interposer of a session on a GPU: operators that use no GPU pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from dtrrun.core.graph import Version
from dtrrun.runtime import rng
from dtrrun.runtime.cost_model import GPU as GPU_RATES
from dtrrun.runtime.cuda.oom_retry import requested
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.dispatch.interposer import Interposer
from dtrrun.runtime.dispatch.threads import joins
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.operators import Operator


class CudaInterposer(Interposer):
    """An `Interposer` that wakes the session and handles out-of-memory errors of operators."""

    def __init__(
        self,
        native: ModuleType,
        callbacks: Callbacks,
        device: Any,
        noticed: Callable[[], None],
        alert: Callable[[str], None],
    ) -> None:
        super().__init__(native, callbacks, noticed, alert)
        self.device = device
        self.device_type = device.type
        self.times = device.operators.times
        self.prices = True  # until an event says more

    @property
    def place(self) -> torch.device:  # type: ignore[override]
        """The device in use."""
        return torch.device(self.device.type, self.device.present.gpu.index)

    def wake(self, args: Any, kwargs: Any) -> bool:
        """Return whether an operator uses a GPU; if so, let the session begin to use it, too."""
        device = self.device
        if not device.concerned(args, kwargs):
            return False
        self.native.bind(device.gpu.index)
        return True

    # -- what C++ asks ---------------------------------------------------------------------------

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
        self.device.present.gpu.occupy()

    def loaded(self) -> None:
        """Note that a call may have loaded kernels, or a library."""
        self.device.operators.loaded()

    def may_replay_again(self, operator: Operator, error: Any) -> bool:
        """Return whether a replay that raised `error` may be repeated, for it has lacked memory."""
        device = self.device
        if not device.operators.can_retry(operator, error, True):
            return False
        device.retry.met(error)
        device.retry.refused = requested(str(error))
        return True

    def replay_again(self, run: Callable[[], None], operator: Operator, nbytes: int) -> None:
        """Call run(), which repeats such a replay. nbytes: of its results. Raises BudgetError."""
        self.device.retry.attempt(run, operator.name, nbytes)

    def run_again(
        self, run: Callable[[], None], operator: Operator, drawn: Any, nbytes: int, ran: bool
    ) -> None:
        """Call run(), which repeats an operator for which `can_retry` has returned True.

        drawn: as for `can_retry`. nbytes: of its results. ran: such a call has succeeded before. Raises
        BudgetError.
        """
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and drawn is not None:
                rng.put_back(drawn)
            run()

        self.device.retry.attempt(attempt, operator.name, nbytes, ran=ran)

    def used_beside(self, versions: Sequence[Version], results: Sequence[torch.Tensor]) -> None:
        """Note that an operator on a side stream has used these versions, and made these results."""
        self.device.operators.pin_side(versions, results)

    def join(self) -> None:
        joins()

    def overlap(self) -> None:
        """Note that operators of two threads overlap: from now on, they take turns."""
        self.callbacks.shared = True
        self.share(self.callbacks.reasons)

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
