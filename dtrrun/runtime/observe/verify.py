"""`--verify`: compares fingerprints of each storage before eviction and after rematerialization."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import partial

import torch

from dtrrun.core.graph import Version
from dtrrun.runtime.cuda.sums import Sum, Sums
from dtrrun.runtime.guards import aside

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
        self._sums: Sums | None = None
        self._unsettled: list[tuple[Sum, Sum, str, int]] = []

    @staticmethod
    def note(version: Version, tensor: torch.Tensor) -> None:
        """Note a result's extent: some operators (`mse_loss`) allocate more, and never write the rest."""
        if tensor.is_contiguous():
            version.extent = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()

    def of(self, version: Version) -> bytes | Sum:
        storage = version.memory()
        assert storage is not None
        if storage.device.type == "cuda":
            found = self._on_gpu(storage, _extent(version, storage))
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
        elif (after := self._on_gpu(storage, nbytes)) is not None:
            self._unsettled.append((before, after, name, version.nbytes))

    def settle(self) -> None:
        """Wait for the fingerprints that a GPU computes, and compare them."""
        unsettled, self._unsettled = self._unsettled, []
        if unsettled:
            assert self._sums is not None
            figures = aside(self._sums.read)
            for before, after, name, nbytes in unsettled:
                self._count(figures[before.slot] == figures[after.slot], name, nbytes)

    def _count(self, same: bool, name: str, nbytes: int) -> None:
        self.verified += 1
        if not same:
            tally = self.mismatches.setdefault(name, [0, 0])
            tally[0] += 1
            tally[1] += nbytes

    def _on_gpu(self, storage: torch.UntypedStorage, nbytes: int) -> Sum | None:
        """Return None if the GPU has no memory left for it."""
        try:
            if self._sums is None:
                self._sums = aside(partial(Sums, storage.device))
            if not self._sums.has_room():
                self.settle()
            found: Sum | None = (
                aside(partial(self._sums.of, storage, nbytes)) if self._sums.has_room() else None
            )
        except torch.OutOfMemoryError as error:
            self._refused(error)
            return None
        return found


def _extent(version: Version, storage: torch.UntypedStorage) -> int:
    """Return how many bytes of a storage its operator has written."""
    return storage.nbytes() if version.extent < 0 else min(version.extent, storage.nbytes())


def _on_host(storage: torch.UntypedStorage, nbytes: int) -> bytes:
    if storage.device.type != "cpu":
        storage = aside(storage.cpu)
    content = (ctypes.c_char * nbytes).from_address(storage.data_ptr()) if nbytes else b""
    return hashlib.blake2b(content, digest_size=16).digest()
