"""Events per second of live processes, from their records a few seconds ago and now."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dtrrun.telemetry.record import Snapshot

KEPT_NS = 10_000_000_000


class Rates:
    """The last ten seconds of snapshots, by process."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Snapshot]] = {}

    def add(self, snapshots: Sequence[Snapshot]) -> None:
        self._kept = {s.pid: self._kept.get(s.pid) or deque() for s in snapshots}
        for snapshot in snapshots:
            kept = self._kept[snapshot.pid]
            kept.append(snapshot)
            while snapshot.read_ns - kept[0].read_ns > KEPT_NS:
                kept.popleft()

    def rate(self, pid: int, counter: str, window: float = 2.0) -> float:
        """Return the increase per second of `counter` of process `pid`, over the last `window` seconds."""
        kept = self._kept.get(pid)
        if not kept:
            return 0.0
        now = kept[-1]
        then = next(s for s in kept if now.read_ns - s.read_ns <= window * 1e9)
        elapsed = (now.read_ns - then.read_ns) / 1e9
        return (now.counters[counter] - then.counters[counter]) / elapsed if elapsed > 0 else 0.0

    def steps(self, pid: int) -> float:
        """Return steps per second; if none ended within the stored time, the mean so far."""
        recent = self.rate(pid, "steps", KEPT_NS / 1e9)
        if recent > 0 or pid not in self._kept:
            return recent
        counters = self._kept[pid][-1].counters
        return counters["steps"] / max(counters["wall_ns"] / 1e9, 1.0)
