"""Copies of constants that are about to change: weights in an optimizer's step, running statistics.

What was computed from the old content and is still referred to, such as the graph of an evaluation, can't be
recomputed once the content is overwritten. All of it would have to stay. Where the constants are small beside
it, copies of them are kept instead, for as long as a recipe reads them: the old version of each gets its copy
as its memory when it is superseded.

An ordinary step refers to its loss and its outputs when the weights change, which takes a fraction of what
the weights do, so nothing is copied for it. To find that out takes a look at what the program has, and
sometimes at all recipes. So a look counts for as many operators as it has looked at versions.
"""

from __future__ import annotations

from dtrrun.core.backend import Executor
from dtrrun.core.evict import Eviction
from dtrrun.core.graph import Version
from dtrrun.core.ledger import Ledger

SHARE_SHIFT = 2  # copies may take a quarter of what depends on them
SHORTEST = 64  # number of operators that a look counts for, at least


class Copies:
    """Decides which constants are copied before they change, and makes the copies."""

    __slots__ = ("__dict__", "chosen", "most", "until")  # what the native extension reads

    def __init__(self, ledger: Ledger, eviction: Eviction, executor: Executor) -> None:
        self._ledger, self._eviction, self._executor = ledger, eviction, executor
        self._walks = ledger.graph.walks
        self.until = -1  # the ledger's age up to which the last look counts
        self.most = 0  # bytes that a copy may take
        self.chosen: set[int] | None = None  # keys of the versions worth a copy, once that has been asked

    def keep(self, version: Version) -> bool:
        """A constant is about to change. Returns whether recipes can go on reading its present content."""
        if version.copy is not None:
            return True
        content = version.memory() if self.wants(version) else None
        if content is None or not (self._eviction.try_room(version.nbytes) or self._eviction.warn_only):
            return False
        try:
            copy = self._executor.copy(content)
        except (RuntimeError, MemoryError):  # the system has no memory for it
            return False
        self._ledger.keep_copy(version, copy)
        return True

    def wants(self, version: Version) -> bool:
        """Return whether a constant that is about to change is worth a copy.

        Before memory has run short, none is: what depends on it need not be evicted then.
        """
        ledger = self._ledger
        if not (ledger.pressure and version.used) or version.copy is not None:
            return False
        if version.operation is not None or version.escaped or not (version.resident and ledger.evicting):
            return False
        if ledger.age > self.until:
            ledger.collect_dead()
            self.most = self._walks.held_bytes(ledger.versions) >> SHARE_SHIFT
            self.until = ledger.age + max(len(ledger.versions), SHORTEST)
            self.chosen = None
        if version.nbytes > self.most:
            return False
        if self.chosen is None:
            ledger.collect_dead()
            self.chosen, looked_at = self._walks.weigh(ledger.versions)
            self.until = ledger.age + max(looked_at, SHORTEST)
        return version.key in self.chosen
