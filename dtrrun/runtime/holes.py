"""Which blocks to evict so that one usable hole results (as in Coop, MegEngine). Plain Python, no torch.

When a request fails although enough bytes are free in all, more free bytes elsewhere do not help: they must
lie side by side. The allocator's snapshot gives the blocks of each segment in the order of their addresses;
the cheapest window of free and evictable blocks that is large enough is the hole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """A part of a segment: where it begins, how many bytes it has, and whether it is free."""

    address: int
    nbytes: int
    free: bool


Segment = Sequence[Block]


def best_hole(
    segments: Sequence[Segment], wanted: int, price: Callable[[int], float | None]
) -> list[int] | None:
    """Addresses of the blocks to evict for a hole of `wanted` bytes at the least price; None: there is none.

    price: of evicting the block at an address, None where it has to stay.
    """
    best: list[int] | None = None
    least = float("inf")
    for segment in segments:
        window: deque[tuple[Block, float]] = deque()
        nbytes, cost = 0, 0.0
        for block in segment:
            found = 0.0 if block.free else price(block.address)
            if found is None:
                window.clear()
                nbytes, cost = 0, 0.0
                continue
            window.append((block, found))
            nbytes += block.nbytes
            cost += found
            while nbytes - window[0][0].nbytes >= wanted:
                first, paid = window.popleft()
                nbytes -= first.nbytes
                cost -= paid
            if nbytes >= wanted and cost < least:
                least = cost
                best = [one.address for one, _ in window if not one.free]
    return best


def fragmented_bytes(segments: Sequence[Segment]) -> int:
    """Free bytes beside the largest free block."""
    free = [block.nbytes for segment in segments for block in segment if block.free]
    return sum(free) - max(free, default=0)
