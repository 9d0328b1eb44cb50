"""What operators cost on a GPU: CUDA events around a signature's first few calls, read when they are done.

The host returns from a launch long before the kernel has run, so that its own clock says nothing. Nobody
waits for an event: until one has been read, the cost model's figure stands. The time between two events is
that of the kernels, or that of the launches where these take longer: an operator's part in the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from dtrrun.ledger.record import Signature

MOST_PENDING = 512  # pairs of events; more than that are not measured at a time
READ_AT_ONCE = 8


class Timer:
    """A pool of events, and the pairs that have not been read yet."""

    def __init__(self, new_event: Callable[[], Any], stream: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._stream = stream  # named, since the current device may be another
        self._idle: list[Any] = []
        self.pending: deque[tuple[Signature, Any, Any]] = deque()

    def begin(self) -> Any:
        """Record an event before an operator; None if too many are under way."""
        if len(self.pending) >= MOST_PENDING:
            return None
        event = self._event()
        event.record(self._stream())
        return event

    def _event(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:  # not asked before: another thread may have the last one by then
            return self._new_event()

    def end(self, signature: Signature, start: Any) -> None:
        """Record another after it. Its cost is read by a later `poll`."""
        event = self._event()
        event.record(self._stream())
        self.pending.append((signature, start, event))

    def dropped(self, start: Any) -> None:
        """The operator failed."""
        self._idle.append(start)

    def poll(self) -> None:
        """Read what is done: a signature's cost is the least that was measured. One thread at a time."""
        for _ in range(READ_AT_ONCE):
            if not self.pending or not self.pending[0][2].query():
                return
            signature, start, end = self.pending.popleft()
            cost = max(round(start.elapsed_time(end) * 1e6), 1)
            if not signature.timed or cost < signature.cost:
                signature.cost = cost
                signature.timed = True
            self._idle += (start, end)
