"""Ends the ranks that wait for one whose budget was too small.

Such a rank ends with an error, and the others wait for it in a collective: with NCCL, for ten minutes.
torchrun ends those on the same node at once. A shell script that starts ranks in the background, or a batch
system, may not.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrrun.launch.periodic import Periodic
from dtrrun.monitor import sending
from dtrrun.telemetry.record import TOO_SMALL, Snapshot, read_all
from dtrrun.telemetry.run import told_of_another_node

EVERY_SECONDS = 1.0
WAITING_SECONDS = 10.0
"""How long a rank must have run no operator since the other has ended, to be ended by SIGTERM."""
GRACE_SECONDS = 5.0
"""How long it has after that, until SIGKILL."""
WAITED = "error: the budget of {failed} was too small; {waiting} waited for it, and is ended now"

Key = tuple[int, Any]


class Ranks:
    """Watches the ranks with records in `folder` while entered."""

    def __init__(
        self,
        folder: str,
        tell: Callable[[str], None] = lambda _: None,
        *,
        send: Callable[[Snapshot, int], None] = sending.send,
    ) -> None:
        """tell: shows the user one line."""
        self._folder, self._tell, self._send = folder, tell, send
        self._seen: dict[Key, tuple[int, float]] = {}  # number of operators, and when it was seen first
        self._told: set[Key] = set()
        self._periodic = Periodic("ranks", EVERY_SECONDS, self._watch)

    def __enter__(self) -> Ranks:
        self._periodic.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._periodic.stop()

    def _watch(self) -> None:
        elsewhere = told_of_another_node(self._folder)
        self.look(read_all(self._folder, tables=False), time.monotonic(), elsewhere)

    def look(
        self, snapshots: Sequence[Snapshot], now: float, elsewhere: Mapping[str, str] | None = None
    ) -> None:
        """End ranks that have waited for long. now: in seconds. elsewhere: of `told_of_another_node`."""
        failed = {elsewhere["world"]: f"rank {elsewhere['rank']} (on another node)"} if elsewhere else {}
        failed |= {
            world: _name(one)
            for one in snapshots
            if one.status == TOO_SMALL and (world := one.meta.get("world"))
        }
        for one in snapshots:
            world = one.meta.get("world")
            if world not in failed or one.ended or not one.alive:
                continue
            key = one.pid, one.meta.get("start")
            operators = one.counters["operators"]
            before, since = self._seen.get(key, (-1, now))
            if operators != before:
                since = now
            self._seen[key] = operators, since
            if now - since < WAITING_SECONDS:
                continue
            if key not in self._told:
                self._told.add(key)
                self._tell(WAITED.format(failed=failed[world], waiting=_name(one)))
            is_over = now - since >= WAITING_SECONDS + GRACE_SECONDS
            self._send(one, signal.SIGKILL if is_over else signal.SIGTERM)


def _name(snapshot: Snapshot) -> str:
    return f"rank {snapshot.meta.get('rank')}"
