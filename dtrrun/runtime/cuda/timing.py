"""Measures operators on a GPU with CUDA events around a signature's first few calls.

The host returns from a launch long before the kernel has run, so the host's clock is of no use. Nothing waits
for an event: until one has been read, the cost model's value is used.

The time between two events is that of the kernels only if the GPU was busy with earlier work while the host
launched them. Otherwise it includes the time of the launch: on an H200, a kernel of 5 µs seems to take 65 µs
if the host needs 30 µs between the two records, and 180 µs if it needs 120, as it does on the slow path
(`python -m tests.bench.gpu_short.calls`). So a pair whose first event had already been reached when the
launch returned is only an upper bound. If a signature has no better one after its first call, which may load
kernels, a GPU without work is given some that does nothing before the next: the pair then is exact, and the
program loses nothing, since its GPU would wait for the host.
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

    def __init__(
        self, new_event: Callable[[], Any], stream: Callable[[], Any], occupy: Callable[[], Any]
    ) -> None:
        """occupy: gives a GPU without work some that takes longer than the host's launch of an operator."""
        self._new_event = new_event
        self._occupy = occupy
        self._stream = stream  # explicit, since another device may be current
        self._idle: list[Any] = []
        self.pending: deque[tuple[Signature, Any, Any, bool]] = deque()

    def begin(self, signature: Signature) -> Any:
        """Record an event before an operator. Returns None if too many are pending."""
        if len(self.pending) >= MOST_PENDING:
            return None
        event = self._event()
        if signature.calls and not signature.timed:
            self._occupy()
        event.record(self._stream())
        return event

    def _event(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:  # no prior check, because another thread could take the last one
            return self._new_event()

    def end(self, signature: Signature, start: Any) -> None:
        """Record an event after the operator. A later `poll` reads the cost."""
        exact = not start.query()  # otherwise the GPU has waited for the host
        event = self._event()
        event.record(self._stream())
        self.pending.append((signature, start, event, exact and not signature.timed))
        signature.timed |= exact

    def dropped(self, start: Any) -> None:
        """Reuse the event of an operator that failed."""
        self._idle.append(start)

    def poll(self) -> None:
        """Read finished pairs: a signature's cost is the minimum measured. Not thread-safe.

        Pairs that are upper bounds only lower the cost model's value, which the first exact one replaces.
        """
        for _ in range(READ_AT_ONCE):
            if not self.pending or not self.pending[0][2].query():
                return
            signature, start, end, replaces = self.pending.popleft()
            cost = max(round(start.elapsed_time(end) * 1e6), 1)
            if cost < signature.cost or replaces:
                signature.cost = cost
            self._idle += (start, end)
