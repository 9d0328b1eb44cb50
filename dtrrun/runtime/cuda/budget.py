"""What a GPU's budget leaves for tensors: plain arithmetic, no torch.

    cap = budget - overhead - guard            what the caching allocator may take from the driver
    limit = cap - unaccounted - slack          what the ledger may give to tensors

overhead: what the driver shows for the process beyond the allocator's memory (context, libraries, loaded
kernels). guard: reserve for its growth between two checks. unaccounted: what the allocator has handed out
beyond the ledger's tensors (persistent workspaces, the unsplit ends of blocks). slack: what fragmentation
makes unusable. All sizes are in bytes.
"""

from __future__ import annotations

from dtrrun.core.ledger import UNLIMITED

MIB = 1 << 20
LEAST_GUARD = 64 * MIB
GUARD_SHARE = 50  # a fiftieth of the budget: 2 %
SEGMENT = 20 * MIB  # a single request may exceed the cap by this much: the allocator's granularity
LEAST_SLACK = SEGMENT + 2 * MIB  # the ends of the last segment of each of the allocator's two pools
IDLE = 1536 * MIB  # above this, other processes use the device, since no context is this large
CONTEXT = 512 * MIB  # the assumed size of ours in that case
SLACK_SHARE = 4  # never more than a quarter of the cap
DECAY = 8  # guard and slack lose an eighth of their excess at a check, and at a step's end


class Accounts:
    """The parts of one budget, updated by `look`. If `budget_bytes` is None nothing is limited."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.overhead = 0
        self.set_budget(budget_bytes)
        self._slack = 0
        self._others: int | None = None  # bytes of the device used by other processes
        self._reserved = -1
        self._since = 0.0  # when `reserved` was first seen at its present value

    def set_budget(self, budget_bytes: int | None) -> None:
        """Start over with another budget; measurements remain valid."""
        self.budget_bytes = budget_bytes
        self.guard = self.least_guard = 0
        if budget_bytes is not None:
            self.guard = self.least_guard = max(LEAST_GUARD, budget_bytes // GUARD_SHARE)
        self.cap: int | None = None

    def look(self, reserved: int, used: int, driver: tuple[int, float] | None, now: float) -> None:
        """Update from measurements: the allocator's bytes, and the bytes of the device in use.

        driver: the bytes that the launcher last saw for this process, and when. They count if `reserved` has
        not changed since. Times are in seconds, of one clock.
        """
        if reserved != self._reserved:
            self._reserved, self._since = reserved, now
        if driver is not None and driver[1] > self._since:
            self._others = max(used - driver[0], 0)
        first = self._others is None
        if self._others is None:
            own = used - reserved
            self._others = 0 if own <= IDLE else own - CONTEXT
        before, self.overhead = self.overhead, max(used - self._others - reserved, 0)
        if self.budget_bytes is None:
            return
        growth = 0 if first else self.overhead - before
        self.guard = max(
            growth + SEGMENT if growth > 0 else 0,
            self.guard - (self.guard - self.least_guard) // DECAY,
            self.least_guard,
        )
        self.cap = max(self.budget_bytes - self.overhead - self.guard, 0)

    @property
    def slack(self) -> int:
        """Bytes of the cap known to be unusable because of fragmentation."""
        if self.cap is None:
            return 0
        return min(max(self._slack, LEAST_SLACK), self.cap // SLACK_SHARE)

    def limit(self, allocated: int, resident: int) -> int:
        """Return what tensors may take, given their bytes according to allocator and ledger."""
        if self.cap is None:
            return UNLIMITED
        return max(self.cap - max(allocated - resident, 0) - self.slack, 0)

    def request_failed(self, allocated: int, wanted: int) -> None:
        """The allocator refused `wanted` bytes, so the memory that was free then is fragmented."""
        if self.cap is not None:
            unusable = self.cap - allocated
            if unusable > self._slack and unusable >= wanted:
                self._slack = unusable

    def step_ended(self) -> None:
        """Forget some of the fragmentation, since it can disappear."""
        self._slack -= self._slack // DECAY
