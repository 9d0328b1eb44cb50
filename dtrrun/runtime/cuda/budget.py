"""What a GPU's budget leaves for tensors: plain arithmetic, no torch.

    cap = budget - overhead - guard            what the caching allocator may take from the driver,
                                               or less if the program itself limits it
    limit = cap - unaccounted - stranded - slack     what the ledger may give to tensors

overhead: what the driver shows for the process beyond the allocator's memory (context, libraries, loaded
kernels). guard: reserve for its growth between two checks. unaccounted: what the allocator has handed out
beyond the ledger's tensors (persistent workspaces, the unsplit ends of blocks). stranded: what is free in
private pools. slack: what fragmentation makes unusable. All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtrrun.core.ledger import UNLIMITED

MIB = 1 << 20
LEAST_GUARD = 64 * MIB
GUARD_SHARE = 50  # a fiftieth of the budget: 2 %
SEGMENT = 20 * MIB  # a single request may exceed the cap by this much: the allocator's granularity
LEAST_SLACK = SEGMENT + 2 * MIB  # the ends of the last segment of each of the allocator's two pools
IDLE = 1536 * MIB  # above this, other processes use the device, since no context is this large
CONTEXT = 512 * MIB  # the assumed size of our context in that case
SLACK_SHARE = 4  # never more than a quarter of the cap
MANY_SEARCHES = 512  # for neighbours to evict, in one step: together they take longer than what is evicted
FORGET_SEARCHES = 100  # steps, after which it is seen again whether that many are needed
FLUSHED_SHARE = 8  # an eighth of the cap is kept free once the allocator has had to flush
SMALL_UNIT = 2 * MIB  # for requests of up to 1 MiB, which have a pool of their own
DECAY = 8  # the guard's excess shrinks by an eighth at each check, the slack at each step's end


def sufficient_budget(footprint: int) -> int:
    """Return the least budget, in bytes, that leaves room for this footprint."""
    rest = footprint + LEAST_SLACK
    return max(rest + LEAST_GUARD, (rest - 1) * GUARD_SHARE // (GUARD_SHARE - 1) + 1)


class Accounts:
    """The parts of one budget, updated by `look`. If `budget_bytes` is None nothing is limited."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.overhead = 0
        self._sure_overhead: int | None = None  # when the driver's figure last counted
        self._least_overhead = 0  # known so far: a context does not shrink
        self._unexplained = 0  # growth since then without an operator's first run
        self.stranded = 0
        self.programs_cap: int | None = None  # what the program lets the allocator take; None: all
        self.forbidden = 0  # bytes of the budget that the program's limit excludes
        self.set_budget(budget_bytes)
        self._slack = self._crowded = 0
        self._until_forgotten = 0  # steps
        self._others: int | None = None  # bytes of the device used by other processes
        self._reserved = -1
        self._since = 0.0  # when `reserved` was first seen at its present value
        self.figured = -1.0  # the time of the last reading for which the driver's figure counted

    def set_budget(self, budget_bytes: int | None) -> None:
        """Start over with another budget; measurements remain valid."""
        self.budget_bytes = budget_bytes
        self.least_guard = 0 if budget_bytes is None else max(LEAST_GUARD, budget_bytes // GUARD_SHARE)
        self.forget_growth()
        self.cap: int | None = None

    def forget_growth(self) -> None:
        """Reset the guard to its initial value until memory grows again."""
        self.guard = self._sure_guard = self.least_guard

    def still_since(self, reserved: int, now: float) -> float:
        """Return the time since which the allocator's bytes have not changed."""
        if reserved != self._reserved:
            self._reserved, self._since = reserved, now
        return self._since

    def doubtful(self, reserved: int, used: int) -> bool:
        """Return whether much memory that may be another process's would be counted as ours."""
        return self._others is None or used - self._others - reserved - self.overhead > SEGMENT

    def look(
        self, reserved: int, used: int, driver: tuple[int, float] | None, now: float, *, loaded: bool = False
    ) -> None:
        """Update from measurements: the allocator's bytes, and the device's bytes in use.

        driver: the bytes that the driver last showed for this process, and when. They count if `reserved` has
        not changed since. Times are in seconds on one clock. loaded: an operator has run for the first time.
        """
        since, first, figured = self.still_since(reserved, now), self._others is None, False
        if driver is not None and driver[1] >= since:
            figured, self._others, self.figured = True, max(used - driver[0], 0), now
        if self._others is None:
            own = used - reserved
            self._others = 0 if own <= IDLE else own - CONTEXT
        if not figured:  # when another process ends, less is in use, but not by us
            self._others = max(min(self._others, used - reserved - self._least_overhead), 0)
        before, self.overhead, guard = self.overhead, max(used - self._others - reserved, 0), self.guard
        if figured:  # growth in the meantime may have been another process's
            before = before if self._sure_overhead is None else self._sure_overhead
            guard, self._sure_overhead = self._sure_guard, self.overhead
        if first or figured:
            self._least_overhead = self.overhead
        growth = 0 if first else self.overhead - before
        if figured or loaded or growth < SEGMENT:
            self._unexplained = 0 if figured else min(self._unexplained, self.overhead - self._least_overhead)
        else:
            self._unexplained += growth
        if self.budget_bytes is None:
            return
        self.guard = max(
            growth + SEGMENT if growth > 0 else 0,
            guard - (guard - self.least_guard) // DECAY,
            self.least_guard,
        )
        if figured:
            self._sure_guard = self.guard
        cap = max(self.budget_bytes - self.overhead - self.guard, 0)
        self.cap = cap if self.programs_cap is None else min(cap, self.programs_cap)
        self.forbidden = cap - self.cap

    def disown(self) -> int:
        """Attribute growth without an operator's first run to other processes. Returns its bytes."""
        found, self._unexplained = self._unexplained, 0
        self._others = (self._others or 0) + found
        return found

    @property
    def slack(self) -> int:
        """Bytes of the cap known to be unusable because of fragmentation."""
        if self.cap is None:
            return 0
        return min(max(self._slack, self._crowded, LEAST_SLACK), self.cap // SLACK_SHARE)

    def limit(self, allocated: int, resident: int) -> int:
        """Return what tensors may take, given the bytes in use according to the allocator and the ledger."""
        if self.cap is None:
            return UNLIMITED
        return max(self.cap - max(allocated - resident, 0) - self.stranded - self.slack, 0)

    def request_failed(self, allocated: int, wanted: int) -> None:
        """Note that the allocator refused `wanted` bytes: the memory that was free then is fragmented."""
        if self.cap is not None:
            unusable = self.cap - allocated - self.stranded
            if unusable > self._slack and unusable >= wanted:
                self._slack = unusable

    def _settle_searches(self, unused: Sequence[int]) -> None:
        """Keep so much free that the ledger runs short of memory before the allocator does, if that has
        searched for neighbours too often in this step.

        As much is evicted either way, but what scores least is found far sooner than the cheapest window.
        """
        self._until_forgotten -= 1
        if len(unused) >= MANY_SEARCHES:
            most = sorted(unused)[len(unused) * 3 // 4]  # for three in four of them
            self._crowded, self._until_forgotten = self.slack + most, FORGET_SEARCHES
        elif self._until_forgotten <= 0:
            self._crowded = 0

    def step_ended(self, flushed: bool, unused: Sequence[int] = ()) -> None:
        """Forget some of the fragmentation, since it can disappear.

        flushed: the allocator has returned its cache, which waits for the GPU and unmaps all free memory, and
        that can't be avoided otherwise. With more memory free, a request finds a block that is large enough.

        unused: for each time in this step that the allocator had no block for a request, and could not map
        one, how many bytes more tensors could have taken. If that is much, another of the allocator's pools
        has it, and it is left out.
        """
        self._settle_searches(unused)
        self._slack -= self._slack // DECAY
        if flushed and self.cap is not None:
            self._slack = max(self._slack, self.cap // FLUSHED_SHARE)
