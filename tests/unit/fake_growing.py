"""The fake GPU's allocator with growing segments (`expandable_segments:True`), by the real one's constants.

Stricter than its base, as the real one is (c10/cuda/CUDACachingAllocator.cpp): it takes memory by pages, of
which the last may go beyond the cap; it asks whether the whole request, rounded up, fits below the cap, also
where only a page of it is missing; its error names that size; what is free again goes back by whole pages.
It takes the best fit, in which a block counts with the unmapped addresses behind it (`get_free_block`), else
the lowest addresses at which free and unmapped blocks together are large enough (`find_expandable_block`).
"""

from dataclasses import dataclass, field

import torch
from fake_allocator import Allocator, Piece

from dtrrun.runtime.shares import MIB

PAGE = 20 * MIB
ENDLESS = 1 << 60  # the addresses behind a pool's last part


@dataclass
class Part(Piece):
    """A piece of a pool's address space; `mapped`: there is memory behind it."""

    mapped: bool = True


@dataclass
class Growing(Allocator):
    """Two pools, each a list of parts in the order of their addresses; what lies beyond is unmapped.

    The pool of small blocks has pages of 2 units for requests of up to one, the other has pages of 20; a unit
    of less than a MiB stands for a smaller program with the same holes.
    """

    segments: list = field(default_factory=lambda: [[], []])
    unit: int = MIB
    page: int = 20  # units, of the pool of large blocks (`large_segment_size_mb`)

    @property
    def pages(self):
        return 2 * self.unit, self.page * self.unit

    def asked_for(self, nbytes):
        """What a request counts as against the cap, and in the error's text."""
        small, page = self.pages
        if nbytes <= self.unit:
            return small
        return page if nbytes < 10 * self.unit else -(-nbytes // small) * small

    flushes: int = 0
    unmapped: int = 0  # bytes of all flushes

    @property
    def reserved(self):
        return sum(part.nbytes for pool in self.segments for part in pool if part.mapped)

    @staticmethod
    def apart(one, other):
        return Allocator.apart(one, other) or one.mapped != other.mapped

    def empty_cache(self):
        self.emptied += 1
        self.collect()
        for pool, page in zip(self.segments, self.pages, strict=True):
            start, parts = 0, []
            for part in pool:
                end = start + part.nbytes
                first, last = -(-start // page) * page, end // page * page
                if part.address or not part.mapped or last <= first:
                    parts.append(part)
                else:
                    parts += [Part(first - start), Part(last - first, mapped=False), Part(end - last)]
                start = end
            pool[:] = [part for part in parts if part.nbytes]
            self._merge(pool)
            if pool and not pool[-1].mapped:
                pool.pop()  # as all beyond it

    def mapped(self):
        """The snapshot leaves out what is not mapped: what lies on both sides of it is not one segment."""
        found = [[]]
        for pool in self.segments:
            for part in pool:
                if part.mapped:
                    found[-1].append(part)
                else:
                    found.append([])
            found.append([])
        return [parts for parts in found if parts]

    def find(self, nbytes):
        """The best fit among what is mapped."""
        pool = self.segments[nbytes > self.unit]
        fitting = []
        for place, part in enumerate(pool):
            if part.mapped and not part.address and part.nbytes >= nbytes:
                following = ENDLESS if place + 1 == len(pool) else pool[place + 1].nbytes
                grows = place + 1 == len(pool) or not pool[place + 1].mapped
                fitting.append((part.nbytes, place, part.nbytes + following * grows))
        if not fitting:
            return None
        fitting.sort()
        _, chosen, could_be = fitting[0]
        for _, place, larger in fitting[1:]:
            if larger >= could_be:
                break
            chosen, could_be = place, larger
        return self._split(pool, chosen, nbytes)

    @staticmethod
    def _split(pool, place, nbytes):
        part = pool[place]
        if part.nbytes > nbytes:
            pool.insert(place + 1, Part(part.nbytes - nbytes, mapped=part.mapped))
            part.nbytes = nbytes
        return part

    def reserve(self, nbytes):
        self.collect()
        nbytes = -(-nbytes // 512) * 512
        piece = self.find(nbytes)
        if piece is None:
            counts = self.asked_for(nbytes)
            if self.cap is not None and self.reserved + counts > self.cap:
                self._flush()
                if self.reserved + counts > self.cap:
                    self.ooms += 1
                    raise torch.OutOfMemoryError(
                        f"CUDA out of memory. Tried to allocate {counts / MIB:.2f} MiB. GPU 0 has"
                    )
            piece = self._map(nbytes)
        self.allocated += nbytes
        self.total += nbytes
        self.peak = max(self.peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return piece

    def _flush(self):
        self.flushes += 1
        before = self.reserved
        self.empty_cache()
        self.emptied -= 1
        self.unmapped += before - self.reserved

    def _map(self, nbytes):
        """By whole pages, at the lowest address where what is free and what is not mapped are enough."""
        pool, page = self.segments[nbytes > self.unit], self.pages[nbytes > self.unit]
        pool.append(Part(ENDLESS, mapped=False))
        for place, part in enumerate(pool):
            first = place - (place > 0 and not pool[place - 1].address)
            if not part.mapped and self._room(pool, first) >= nbytes:
                break
        while not (pool[first].mapped and pool[first].nbytes >= nbytes):
            missing = first + pool[first].mapped  # what is free lies between two unmapped ones at most
            have = pool[first].nbytes if missing > first else 0
            more = min(-(-(nbytes - have) // page) * page, pool[missing].nbytes)
            self._split(pool, missing, more).mapped = True
            self._merge(pool)
        pool.pop()
        return self._split(pool, first, nbytes)

    @staticmethod
    def _room(pool, place):
        nbytes = 0
        while place < len(pool) and not pool[place].address:
            nbytes += pool[place].nbytes
            place += 1
        return nbytes
