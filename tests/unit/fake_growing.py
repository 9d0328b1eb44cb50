"""The fake GPU's allocator with growing segments (`expandable_segments:True`), by the real one's constants.

Stricter than `fake_gpu.Allocator`, as the real one is: it takes memory by pages, of which the last may go
beyond the cap; it asks whether the whole request, rounded up, fits below the cap; its error names that size;
and what is free again goes back by whole pages.
"""

from dataclasses import dataclass, field

import torch
from fake_gpu import Allocator, Piece, address_of

from dtrrun.runtime.shares import MIB

PAGE = 20 * MIB


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

    @property
    def pages(self):
        return 2 * self.unit, 20 * self.unit

    def asked_for(self, nbytes):
        """What a request counts as against the cap, and in the error's text."""
        small, page = self.pages
        if nbytes <= self.unit:
            return small
        return page if nbytes < 10 * self.unit else -(-nbytes // small) * small

    flushes: int = 0

    @property
    def reserved(self):
        return sum(part.nbytes for pool in self.segments for part in pool if part.mapped)

    def collect(self):
        self.known = [known for known in self.known if known() is not None]
        alive = {address_of(storage) for known in self.known if (storage := known()) is not None}
        for pool in self.segments:
            for part in pool:
                if part.address and part.address not in alive and not (part.address < 0 and self.busy):
                    self.allocated -= part.nbytes
                    part.address = 0
            self._merge(pool)

    @staticmethod
    def _merge(pool):
        place = 0
        while place + 1 < len(pool):
            one, other = pool[place], pool[place + 1]
            if one.address or other.address or one.mapped != other.mapped:
                place += 1
            else:
                one.nbytes += pool.pop(place + 1).nbytes
        if pool and not pool[-1].mapped:
            pool.pop()  # as all beyond it

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

    def find(self, nbytes):
        pool = self.segments[nbytes > self.unit]
        fitting = [part for part in pool if part.mapped and not part.address and part.nbytes >= nbytes]
        if not fitting:
            return None
        return self._split(pool, min(fitting, key=lambda part: part.nbytes), nbytes)

    @staticmethod
    def _split(pool, part, nbytes):
        if part.nbytes > nbytes:
            place = next(i for i, one in enumerate(pool) if one is part)
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
                self.flushes += 1
                self.empty_cache()
                self.emptied -= 1
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

    def _map(self, nbytes):
        """At the end, behind what is free there, by whole pages."""
        large = nbytes > self.unit
        pool, page = self.segments[large], self.pages[large]
        tail = pool[-1].nbytes if pool and not pool[-1].address else 0
        more = -(-max(nbytes - tail, 1) // page) * page
        pool.append(Part(more))
        self._merge(pool)
        return self._split(pool, pool[-1], nbytes)
