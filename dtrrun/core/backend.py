"""What the core requires of its environment: real storages in the runtime, stand-ins in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dtrrun.core.foresight import Foresight
from dtrrun.core.graph import Version
from dtrrun.core.heuristics import Heuristic


class Memory(Protocol):
    """Storages: their sizes and owners. C++ empties and refills them.

    Implemented by `runtime.storage`.
    """

    def size_of(self, storage: Any) -> int:
        """Return the bytes that a storage takes, as rounded by its allocator."""

    def device_type_of(self, storage: Any) -> str: ...

    def is_ours(self, storage: Any) -> bool:
        """Return whether the allocator alone owns the memory, and not NumPy, a file, or another process."""

    def span_of(self, storage: Any) -> tuple[int, int]:
        """Return the start and end address of a storage that is in memory."""

    def mapping_of(self, span: tuple[int, int]) -> str:
        """Return the kind of mapping that these addresses are in: see `runtime.storage.mapping_of`."""

    def is_from_worker(self, span: tuple[int, int]) -> bool:
        """Return whether a `DataLoader` worker has made what is at these addresses. Ask only once."""

    def is_held(self, storage: Any) -> bool:
        """Return whether the program holds the storage itself, not only tensors over it."""

    def checksum(self, storage: Any) -> int: ...


class Executor(Protocol):
    """Runs recorded operators again. Python calls these methods; in a session, C++ calls more."""

    def below(self) -> AbstractContextManager[Any]:
        """Return a context in which operators run hidden from the program.

        Enter it twice (`with guard, guard`): an interrupt that comes while it is entered or left then still
        finds it to be left.
        """

    def quietly(self, function: Any, *args: Any) -> Any:
        """Call a function that runs operators, and suppress their warnings."""


class Policy(Protocol):
    """Chooses what to evict among the versions inserted into it (`core/policy/policy.h`).

    Its owner reports what happens to the versions, each event once and in order. Accesses are not reported:
    `last_access` is read when a score is computed. Not thread-safe and not re-entrant, but an evicted version
    may die at any moment without notice.
    """

    heuristic: Heuristic
    foresight: Foresight | None
    """Set by the owner, for heuristics that use foresight."""
    nbytes: int
    """Of the versions in the pool."""
    score_evaluations: int
    scoring_ns: int
    """Time spent computing scores, including reading neighbourhoods."""
    search_ns: int
    """Time spent in `select`, excluding `scoring_ns`."""
    accesses: int
    """How many storages have been considered, or visited for neighbourhoods (App. D.3)."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]:
        """Yield the versions in the pool, in the order in which they were inserted."""

    def insert(self, version: Any) -> None:
        """`version` became resident and evictable. No effect if it is in the pool or has no bytes."""

    def discard(self, version: Any) -> None:
        """`version` can no longer be evicted: it died or was pinned. No effect if it is not in the pool."""

    def evicted(self, version: Any) -> None: ...
    def released(self, version: Any) -> None:
        """The program released `version` and its memory is freed, while something depends on it."""

    def rematerialized(self, version: Any) -> None:
        """`version` is resident again; `insert` it when it is evictable too."""

    def forget(self, version: Any) -> None:
        """`version`, which is evicted, will never be rematerialized. Its death need not be reported."""

    def cost_changed(self, version: Any) -> None:
        """`version`, resident, has a new cost or other inputs."""

    def projected_cost(self, version: Any) -> int:
        """Return c(version) in ns, with what must be computed before it.

        If it is not in the pool, its own cost.
        """

    def let_copy(self, cost: Callable[[Any], int | None]) -> None:
        """Assume from now on that a version can be copied to the host and back for `cost(version)` ns.

        None: it can't be. Then what is brought back costs the less of both. Call it again when costs fall.
        """

    def select(self, now: int, evictable: Callable[[Any], bool]) -> Any | None:
        """Return the resident version with the lowest score at clock value `now`, or None if there is none.

        `evictable` is called for the one about to be chosen, which is passed over if that returns False. It
        may discard versions. The chosen one stays in the pool until its eviction is reported.
        """


class Fingerprints(Protocol):
    """Digests of evicted contents, under `--verify`."""

    def prepare(self, device: int) -> Any:
        """Allocate what digests take on this GPU. Do it while memory is ample."""

    def of(self, version: Version) -> Any: ...

    def compare(self, version: Version) -> None:
        """Check a version that is in memory again, if it has a fingerprint."""


class Outside(Protocol):
    """Storages that no version counts yet, although they take a part of the budget."""

    def met(self, storage: Any) -> None:
        """Note that a version is about to count this storage."""

    def look(self) -> None:
        """Update the limit, since some may have been freed."""


class Heap(Protocol):
    """The underlying allocator. It is checked whenever enough memory has been freed."""

    def check(self, resident_bytes: int, limit: int) -> None: ...
