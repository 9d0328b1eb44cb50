"""`--verify`: compares fingerprints of each storage before eviction and after rematerialization."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from dtrrun.core.graph import Version
from dtrrun.runtime.guards import below


class Fingerprints:
    """Counts comparisons and mismatches, by the operator that made the storage."""

    def __init__(self) -> None:
        self.verified = 0
        self.mismatches: dict[str, list[int]] = {}  # name: [count, bytes]

    @staticmethod
    def note(version: Version, tensor: torch.Tensor) -> None:
        """Note a result's extent: some operators (`mse_loss`) allocate more, and never write the rest."""
        if tensor.is_contiguous():
            version.extent = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()

    @staticmethod
    def of(version: Version) -> bytes:
        storage = version.memory()
        assert storage is not None
        nbytes = storage.nbytes() if version.extent < 0 else min(version.extent, storage.nbytes())
        if storage.device.type != "cpu":
            with (guard := below()), guard:  # copying is an operator
                storage = storage.cpu()
        content = (ctypes.c_char * nbytes).from_address(storage.data_ptr()) if nbytes else b""
        return hashlib.blake2b(content, digest_size=16).digest()

    def compare(self, version: Version) -> None:
        self.verified += 1
        if self.of(version) != version.fingerprint:
            assert version.operation is not None
            tally = self.mismatches.setdefault(version.operation.signature.operator.name, [0, 0])
            tally[0] += 1
            tally[1] += version.nbytes
        version.fingerprint = None
