"""`--verify`: compares fingerprints of each storage before eviction and after rematerialization."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch

from dtrrun.core.graph import Version
from dtrrun.runtime.cuda.sums import Sum, Sums
from dtrrun.runtime.guards import aside

Made = TypeVar("Made")

COPIED_BACK = "a copy from the host"
"""Stands for the operator of a constant that had left (`core/host.h`)."""


class Fingerprints:
    """Counts comparisons and mismatches, by the operator that made the storage.

    A GPU computes its fingerprints when it comes to them. They are compared, and count, from `settle` on.
    """

    def __init__(self, refused: Callable[[BaseException], None]) -> None:
        """refused: called with the error if a GPU has no memory left for a fingerprint."""
        self._refused = refused
        self.verified = 0
        self.mismatches: dict[str, list[int]] = {}  # name: [count, bytes]
        self._sums: dict[int, Sums | None] = {}  # by GPU; None: it had no memory left for it
        self._unsettled: list[tuple[Sums, Sum, Sum, str, int]] = []

    def prepare(self, device: int) -> Sums | None:
        """Return those of a GPU. The first call allocates memory for them, unless it is in a capture."""
        if device not in self._sums and not torch.cuda.is_current_stream_capturing():
            self._sums[device] = self._unless_refused(lambda: Sums(torch.device("cuda", device)))
        return self._sums.get(device)

    def of(self, version: Version) -> bytes | Sum:
        storage = version.memory()
        assert storage is not None
        if storage.device.type == "cuda":
            sums = self.prepare(storage.device.index)
            found = self._on_gpu(sums, storage, _extent(version, storage), spare=1)  # for the second one
            if found is not None:
                return found
        return _on_host(storage, _extent(version, storage))

    def compare(self, version: Version) -> None:
        storage, before, version.fingerprint = version.memory(), version.fingerprint, None
        assert storage is not None
        nbytes, maker = _extent(version, storage), version.operation
        name = COPIED_BACK if maker is None else maker.signature.operator.name
        if isinstance(before, bytes):
            self._count(before == _on_host(storage, nbytes), name, version.nbytes)
        else:
            sums = self._sums[storage.device.index]
            after = self._on_gpu(sums, storage, nbytes)
            if sums is not None and after is not None:
                self._unsettled.append((sums, before, after, name, version.nbytes))

    def settle(self) -> None:
        """Wait for the fingerprints that a GPU computes, and compare them."""
        unsettled, self._unsettled = self._unsettled, []
        figures = {sums: aside(sums.read) for sums, *_ in unsettled}
        for sums, before, after, name, nbytes in unsettled:
            self._count(figures[sums][before.slot] == figures[sums][after.slot], name, nbytes)

    def _count(self, same: bool, name: str, nbytes: int) -> None:
        self.verified += 1
        if not same:
            tally = self.mismatches.setdefault(name, [0, 0])
            tally[0] += 1
            tally[1] += nbytes

    def _on_gpu(
        self, sums: Sums | None, storage: torch.UntypedStorage, nbytes: int, *, spare: int = 0
    ) -> Sum | None:
        """Return None if the GPU has no memory left for it, or if fewer than `spare` slots would remain."""
        if sums is None:
            return None
        if not sums.has_room(spare):
            self.settle()
        return self._unless_refused(lambda: sums.of(storage, nbytes)) if sums.has_room(spare) else None

    def _unless_refused(self, make: Callable[[], Made]) -> Made | None:
        try:
            made: Made = aside(make)
        except torch.OutOfMemoryError as error:
            self._refused(error)
            return None
        return made


def _extent(version: Version, storage: torch.UntypedStorage) -> int:
    """Return how many bytes of a storage its operator has written."""
    return storage.nbytes() if version.extent < 0 else min(version.extent, storage.nbytes())


def _on_host(storage: torch.UntypedStorage, nbytes: int) -> bytes:
    if storage.device.type != "cpu":
        storage = aside(storage.cpu)
    content = (ctypes.c_char * nbytes).from_address(storage.data_ptr()) if nbytes else b""
    return hashlib.blake2b(content, digest_size=16).digest()
