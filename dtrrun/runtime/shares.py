"""What a GPU's budget leaves for tensors: plain arithmetic, no torch.

    cap = budget - overhead - guard            what the caching allocator may take from the driver
    limit = cap - unaccounted - slack          what the ledger may let the tensors take

overhead: what the driver shows for the process beyond the allocator's memory (context, libraries, loaded
kernels). guard: for its growth between two looks. unaccounted: what the allocator has handed out beyond the
ledger's tensors (workspaces that stay, the unsplit ends of blocks). slack: what holes between blocks make
unusable. All sizes are in bytes.
"""

from __future__ import annotations

MIB = 1 << 20
LEAST_GUARD = 64 * MIB
GUARD_SHARE = 50  # a fiftieth of the budget: 2 %
SEGMENT = 20 * MIB  # by as much may one request take the allocator over its cap: the step in which it maps
LEAST_SLACK = SEGMENT + 2 * MIB  # the ends of the last segment of each of the allocator's two pools
IDLE = 1536 * MIB  # more than a context takes: then other processes hold memory of the device, too
CONTEXT = 512 * MIB  # what ours is taken for in that case
SLACK_SHARE = 4  # never more than a quarter of the cap
DECAY = 8  # guard and slack lose an eighth of their excess at a look, and at a step's end


class Accounts:
    """The shares of one budget, brought up to date by `look`. `budget_bytes` None: nothing is limited."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.overhead = 0
        self.set_budget(budget_bytes)
        self._slack = 0
        self._others: int | None = None  # bytes of the device that are not this process's
        self._reserved = -1
        self._since = 0.0  # when it was seen that `reserved` became what it is

    def set_budget(self, budget_bytes: int | None) -> None:
        """Begin anew with another budget; what was measured still holds."""
        self.budget_bytes = budget_bytes
        self.guard = self.least_guard = 0
        if budget_bytes is not None:
            self.guard = self.least_guard = max(LEAST_GUARD, budget_bytes // GUARD_SHARE)
        self.cap: int | None = None

    def look(self, reserved: int, used: int, driver: tuple[int, float] | None, now: float) -> None:
        """Take in what was measured: the allocator's bytes, and those of the device that are in use.

        driver: bytes that the launcher last saw of this process, and when. They count where `reserved` has
        been what it is since then. Times are in seconds, of one clock.
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
        """Bytes of the cap that holes make unusable, as far as is known."""
        if self.cap is None:
            return 0
        return min(max(self._slack, LEAST_SLACK), self.cap // SLACK_SHARE)

    def limit(self, allocated: int, resident: int) -> int:
        """What tensors may take; now they take `allocated` by the allocator, `resident` by the ledger."""
        if self.cap is None:
            return 1 << 62
        return max(self.cap - max(allocated - resident, 0) - self.slack, 0)

    def request_failed(self, allocated: int, wanted: int) -> None:
        """The allocator refused `wanted` bytes: as much as was free then is of no use for such a request."""
        if self.cap is not None:
            unusable = self.cap - allocated
            if unusable > self._slack and unusable >= wanted:
                self._slack = unusable

    def step_ended(self) -> None:
        """Holes close again: what was learned of them fades."""
        self._slack -= self._slack // DECAY
