"""The caching allocator of a fake GPU, with a cap, segments and holes, in plain Python.

Freed memory is found by looking at the storages that there are.
"""

import weakref
from dataclasses import dataclass, field

import torch

from dtrrun.runtime.shares import MIB

address_of = torch._C.StorageBase.data_ptr


@dataclass
class Piece:
    """Of a segment: its bytes, and the address of the storage in it, or 0."""

    nbytes: int
    address: int = 0


@dataclass
class Allocator:
    """First fit into segments, as long as what is reserved stays below the cap."""

    cap: int | None = None
    segments: list = field(default_factory=list)
    allocated: int = 0
    peak: int = 0
    total: int = 0
    reserved_peak: int = 0
    known: list = field(default_factory=list)
    emptied: int = 0
    ooms: int = 0
    busy: bool = False  # an operator runs: its workspace is in use

    @property
    def reserved(self):
        return sum(piece.nbytes for segment in self.segments for piece in segment)

    def collect(self):
        """Free the pieces of storages that died, were emptied, or gave their memory away."""
        self.known = [known for known in self.known if known() is not None]
        alive = {address_of(storage) for known in self.known if (storage := known()) is not None}
        for segment in self.segments:
            for piece in segment:
                if piece.address and piece.address not in alive and not (piece.address < 0 and self.busy):
                    self.allocated -= piece.nbytes
                    piece.address = 0
            self._merge(segment)

    def _merge(self, segment):
        place = 0
        while place + 1 < len(segment):
            if self.apart(segment[place], segment[place + 1]):
                place += 1
            else:
                segment[place].nbytes += segment.pop(place + 1).nbytes

    @staticmethod
    def apart(one, other):
        """Whether two neighbours cannot be one piece."""
        return bool(one.address or other.address)

    def empty_cache(self):
        self.emptied += 1
        self.collect()
        self.segments = [segment for segment in self.segments if any(piece.address for piece in segment)]

    def mapped(self):
        """Pieces side by side, as the snapshot has them."""
        return self.segments

    def find(self, nbytes):
        for segment in self.segments:
            for place, piece in enumerate(segment):
                if not piece.address and piece.nbytes >= nbytes:
                    if piece.nbytes > nbytes:
                        segment.insert(place + 1, Piece(piece.nbytes - nbytes))
                        piece.nbytes = nbytes
                    return piece
        return None

    def reserve(self, nbytes):
        """A piece for a request; raises as the real one does, after it has returned what it does not use."""
        self.collect()
        nbytes = -(-nbytes // 512) * 512
        piece = self.find(nbytes)
        if piece is None and self.cap is not None and self.reserved + nbytes > self.cap:
            self.empty_cache()
            if self.reserved + nbytes > self.cap:
                self.ooms += 1
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes / MIB:.2f} MiB. And more words."
                )
        if piece is None:
            piece = Piece(nbytes)
            self.segments.append([piece])
        self.allocated += nbytes
        self.total += nbytes
        self.peak = max(self.peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return piece

    def take(self, nbytes):
        """Workspace: there for a moment, under an address that no storage has."""
        self.reserve(nbytes).address = -1

    def knows(self, storage):
        return any(known() is storage for known in self.known)

    def enter(self, storage, piece):
        piece.address = address_of(storage)
        self.known.append(weakref.ref(storage))
