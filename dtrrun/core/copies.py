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

from dtrrun.core.backend import Executor, Shortcuts
from dtrrun.core.evict import Eviction
from dtrrun.core.graph import Version
from dtrrun.core.ledger import Ledger

SHARE_SHIFT = 2  # copies may take a quarter of what depends on them
SHORTEST = 64  # number of operators that a look counts for, at least
SMALL = 16 << 10  # bytes
WEIGHTS = ("parameter", "running statistics", "updated in place", "mutated")
"""Pins of constants that are expected to change. Others, such as a batch, usually do not if they are not
small (running statistics that have not been updated yet)."""


class Copies:
    """Decides which constants are copied before they change, and makes the copies."""

    __slots__ = ("__dict__", "chosen", "most", "until")  # what the native extension reads

    def __init__(
        self, ledger: Ledger, eviction: Eviction, executor: Executor, shortcuts: Shortcuts | None = None
    ) -> None:
        self._ledger, self._eviction, self._executor = ledger, eviction, executor
        self._shortcuts = shortcuts
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
            held = None if self._shortcuts is None else self._shortcuts.held_bytes()
            self.most = (held_bytes(ledger) if held is None else held) >> SHARE_SHIFT
            self.until = ledger.age + max(len(ledger.versions), SHORTEST)
            self.chosen = None
        if version.nbytes > self.most:
            return False
        if self.chosen is None:
            ledger.collect_dead()
            weighed = None if self._shortcuts is None else self._shortcuts.weigh()
            self.chosen, looked_at = weigh(ledger) if weighed is None else weighed
            self.until = ledger.age + max(looked_at, SHORTEST)
        return version.key in self.chosen


def held_bytes(ledger: Ledger) -> int:
    """Return the bytes of what the program has and recipes can make."""
    listed = ledger.versions.values()
    return sum([one.nbytes for one in listed if one.operation is not None and one.has_storage])


def weigh(ledger: Ledger) -> tuple[set[int], int]:
    """Return the keys of the constants worth a copy, and how many versions have been looked at.

    What the program has is recomputed from the constants that its recipe leads to through what has been
    released. Constants and results that belong together in this way are weighed together: all the copies are
    needed, or none is of use.
    """
    groups = _Groups()
    others: list[tuple[Version, int]] = []  # small constants, and what reads them
    weights: dict[int, Version] = {}
    held: list[Version] = []
    seen: set[int] = set()
    stack: list[Version] = []
    for version in ledger.versions.values():
        if version.operation is None or not version.has_storage:
            continue
        held.append(version)
        stack.append(version)
        while stack:
            node = stack.pop()
            for source in node.inputs:
                if source.operation is None:
                    if source.superseded or source.escaped or not source.resident:
                        continue  # it has a copy, or is lost
                    if source.pin in WEIGHTS:
                        weights[id(source)] = source
                        groups.join(id(node), id(source))
                    elif source.nbytes <= SMALL:
                        others.append((source, id(node)))
                elif not source.alive:
                    groups.join(id(node), id(source))
                    if id(source) not in seen:
                        seen.add(id(source))
                        stack.append(source)
    balance: dict[int, int] = {}  # of each group: the bytes held, less four times those of its constants
    for version in held:
        group = groups.of(id(version))
        balance[group] = balance.get(group, 0) + version.nbytes
    read = {(groups.of(id(weight)), weight.key): weight for weight in weights.values()}
    read.update({(groups.of(reader), source.key): source for source, reader in others})
    for (group, _), source in read.items():
        balance[group] = balance.get(group, 0) - (source.nbytes << SHARE_SHIFT)
    chosen = {key for group, key in read if balance[group] >= 0}
    return chosen, len(ledger.versions) + len(seen)


class _Groups:
    """Disjoint sets of ids, joined as needed."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}

    def of(self, one: int) -> int:
        """Return the id that stands for the set which has this one."""
        above = self._above
        top = one
        while (upper := above.get(top, top)) != top:
            top = upper
        while one != top:
            above[one], one = top, above.get(one, one)
        return top

    def join(self, one: int, other: int) -> None:
        self._above[self.of(one)] = self.of(other)
