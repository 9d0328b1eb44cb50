"""Measures operators on a GPU with CUDA events around a signature's first few calls.

The host returns from a launch long before the kernel has run, so the host's clock is of no use. Nothing waits
for an event: until one has been read, the cost model's value is used. The time between two events is that of
the kernels, or of their launches if these take longer: an operator's contribution to the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from dtrrun.core.graph import Signature

MOST_PENDING = 512  # pairs of events; no more are measured at a time
READ_AT_ONCE = 8


class Timer:
    """A pool of events, and the pairs that have not been read yet."""

    def __init__(self, new_event: Callable[[], Any], stream: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._stream = stream  # explicit, since another device may be current
        self._idle: list[Any] = []
        self.pending: deque[tuple[Signature, Any, Any]] = deque()

    def begin(self) -> Any:
        """Record an event before an operator. Returns None if too many are pending."""
        if len(self.pending) >= MOST_PENDING:
            return None
        event = self._event()
        event.record(self._stream())
        return event

    def _event(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:  # no prior check, because another thread could take the last one
            return self._new_event()

    def end(self, signature: Signature, start: Any) -> None:
        """Record an event after the operator. A later `poll` reads the cost."""
        event = self._event()
        event.record(self._stream())
        self.pending.append((signature, start, event))

    def dropped(self, start: Any) -> None:
        """Reuse the event of an operator that failed."""
        self._idle.append(start)

    def poll(self) -> None:
        """Read finished pairs: a signature's cost is the minimum measured. Not thread-safe."""
        for _ in range(READ_AT_ONCE):
            if not self.pending or not self.pending[0][2].query():
                return
            signature, start, end = self.pending.popleft()
            cost = max(round(start.elapsed_time(end) * 1e6), 1)
            if not signature.timed or cost < signature.cost:
                signature.cost = cost
                signature.timed = True
            self._idle += (start, end)
