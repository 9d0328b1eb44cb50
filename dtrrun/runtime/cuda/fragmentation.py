"""Chooses blocks to evict for one contiguous free block (as in Coop, MegEngine). Plain Python, no torch.

If a request fails although enough bytes are free in total, more free bytes elsewhere do not help: they must
be contiguous. The allocator's snapshot gives the blocks of each segment by address; the cheapest sufficient
window of free and evictable blocks is chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """A part of a segment: its address, its bytes, and whether it is free."""

    address: int
    nbytes: int
    free: bool


Segment = Sequence[Block]


def best_hole(
    segments: Sequence[Segment], wanted: int, price: Callable[[int], float | None]
) -> list[int] | None:
    """Return the addresses of the blocks to evict for `wanted` contiguous bytes at the least price; or None.

    price: the price of evicting the block at an address, None if it must stay.
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
    """Return the free bytes outside the largest free block."""
    free = [block.nbytes for segment in segments for block in segment if block.free]
    return sum(free) - max(free, default=0)
