"""`--verify`: a fingerprint of every storage at its eviction, compared after its rematerialization."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from dtrrun.ledger.record import Record
from dtrrun.runtime.guards import below


class Fingerprints:
    """Counts what was compared, and what came back with other bits, by the operator that made it."""

    def __init__(self) -> None:
        self.verified = 0
        self.mismatches: dict[str, list[int]] = {}  # name: [count, bytes]

    @staticmethod
    def note(record: Record, tensor: torch.Tensor) -> None:
        """Some operators allocate more than their result takes (`mse_loss`): the rest is never written."""
        if tensor.is_contiguous():
            record.extent = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()

    @staticmethod
    def of(record: Record) -> bytes:
        storage = record.memory()
        assert storage is not None
        nbytes = storage.nbytes() if record.extent < 0 else min(record.extent, storage.nbytes())
        if storage.device.type != "cpu":
            with (guard := below()), guard:  # a copy is an operator
                storage = storage.cpu()
        content = (ctypes.c_char * nbytes).from_address(storage.data_ptr()) if nbytes else b""
        return hashlib.blake2b(content, digest_size=16).digest()

    def compare(self, record: Record) -> None:
        self.verified += 1
        if self.of(record) != record.fingerprint:
            assert record.op is not None
            tally = self.mismatches.setdefault(record.op.signature.operator.name, [0, 0])
            tally[0] += 1
            tally[1] += record.nbytes
        record.fingerprint = None
