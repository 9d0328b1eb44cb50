"""What CUDA's caching allocator takes from the driver for the storages of a log.

Requests are rounded to 512 bytes. Those of up to 1 MB come from segments of 2 MB, those below 10 MB from
segments of 20 MB, and larger ones have a segment of their own, in steps of 2 MB. A free block is split if
what remains is worth it, and joined with its free neighbours when it is freed. Nothing is returned to the
driver: an allocator does that only when memory runs short (`c10/cuda/CUDACachingAllocator.cpp`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from dtrrun.simulator.log import WORK, Call, Constant, Instruction, Mutate, Release

SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE_SEGMENT, LEAST_OWN, STEP = 20 << 20, 10 << 20, 2 << 20
LEAST_SPLIT = 512


class Block:
    """A part of a segment."""

    __slots__ = ("after", "at", "before", "is_free", "nbytes", "pool", "wanted")

    def __init__(self, pool: list[tuple[int, int, Block]], at: int, nbytes: int) -> None:
        self.pool, self.at, self.nbytes = pool, at, nbytes
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_free = False
        self.wanted = 0  # bytes that were asked for


class Segments:
    """The allocator. taken: bytes of its segments."""

    def __init__(self) -> None:
        self.taken = 0
        self._small: list[tuple[int, int, Block]] = []  # free blocks, the smallest first
        self._large: list[tuple[int, int, Block]] = []
        self._next = 0

    def allocate(self, nbytes: int) -> Block:
        small = nbytes <= SMALL
        pool = self._small if small else self._large
        place = bisect_left(pool, (nbytes, -1))
        if place < len(pool):
            block = pool.pop(place)[2]
        else:
            block = Block(pool, self._next, _segment_for(nbytes))
            self.taken += block.nbytes
            self._next += block.nbytes
        block.is_free, block.wanted = False, nbytes
        rest = block.nbytes - nbytes
        if rest >= LEAST_SPLIT if small else rest > SMALL:
            other = Block(pool, block.at + nbytes, rest)
            block.nbytes = nbytes
            other.before, other.after = block, block.after
            if other.after is not None:
                other.after.before = other
            block.after = other
            self._put(other)
        return block

    def free(self, block: Block) -> None:
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._take(before)
            block.at, block.nbytes, block.before = before.at, before.nbytes + block.nbytes, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            self._take(after)
            block.nbytes, block.after = block.nbytes + after.nbytes, after.after
            if block.after is not None:
                block.after.before = block
        self._put(block)

    def _put(self, block: Block) -> None:
        block.is_free = True
        insort(block.pool, (block.nbytes, block.at, block), key=lambda one: one[:2])

    def _take(self, block: Block) -> None:
        place = bisect_left(block.pool, (block.nbytes, block.at))
        del block.pool[place]


def _segment_for(nbytes: int) -> int:
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if nbytes < LEAST_OWN else -(-nbytes // STEP) * STEP


def made_by(one: Instruction) -> list[tuple[int, int]]:
    """Return the numbers and bytes of the storages that begin with an instruction of such a log."""
    if isinstance(one, Constant) and one.facts:
        return [(one.facts["storage"], one.nbytes)]
    if isinstance(one, (Call, Mutate)) and one.facts:
        return [(number, nbytes) for _, number, nbytes, _ in one.facts.get("out", ())]
    return []


def released_by(one: Instruction) -> int | None:
    """Return the number of the storage that ends with an instruction of such a log, if one does."""
    return one.facts["storage"] if isinstance(one, Release) and one.facts else None


def taken_by(log: Iterable[Instruction]) -> tuple[int, int, int]:
    """Return the most bytes at once of tensors, of tensors and workspaces, and of segments.

    log: of `runtime.absent`.
    """
    allocator = Segments()
    blocks: dict[int | None, Block] = {}
    now = tensors = most = 0
    for one in log:
        workspace = 0
        if isinstance(one, (Call, Mutate)) and one.facts:
            workspace = -(-one.facts[WORK][3] // LEAST_SPLIT) * LEAST_SPLIT
        block = blocks.pop(released_by(one), None)
        if block is not None:
            now -= block.wanted
            allocator.free(block)
        for number, nbytes in made_by(one):
            if nbytes:
                blocks[number] = allocator.allocate(nbytes)
                now += nbytes
        tensors, most = max(tensors, now), max(most, now + workspace)
        if workspace:
            allocator.free(allocator.allocate(workspace))
    return tensors, most, allocator.taken
