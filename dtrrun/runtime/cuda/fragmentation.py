"""How the free memory of a caching allocator is divided. Plain Python, no torch.

If a request fails although enough bytes are free in total, more free bytes elsewhere do not help: they must
be contiguous. Which blocks are evicted for such a request: `native/windows.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """A part of a segment: its address, its bytes, and whether it is free."""

    address: int
    nbytes: int
    free: bool


Segment = Sequence[Block]


def fragmented_bytes(segments: Sequence[Segment]) -> int:
    """Return the free bytes outside the largest free block."""
    free = [block.nbytes for segment in segments for block in segment if block.free]
    return sum(free) - max(free, default=0)
