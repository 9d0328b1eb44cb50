"""Classifies an operator's results: which of them are new storages, and of what kind."""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.core.ledger import Ledger
from dtrrun.core.operator import ELSEWHERE, FOREIGN, NEW, READ_NATIVELY, UNTRACKED, Output
from dtrrun.runtime import storage as memory
from dtrrun.runtime.dispatch.arguments import outputs_of
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.storage import place_of, storage_of


def new_storages(result: Any, operator: Operator, ledger: Ledger) -> tuple[list[Output], list[torch.Tensor]]:
    """Return an operator's new storages (not in the ledger), and its results without a plain storage."""
    outputs: list[Output] = []
    unplain: list[torch.Tensor] = []
    seen: set[int] = set()
    for where, tensor in enumerate(outputs_of(result, [])):
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):
            unplain.append(tensor)
            continue
        key = ledger.key_of(storage)
        if key in ledger.versions or key in seen or memory.is_for_shapes(storage):  # as of a wrapper
            continue
        seen.add(key)
        kind = NEW
        if is_odd(tensor, operator):
            kind = UNTRACKED
        elif where == operator.read_unseen:
            kind = READ_NATIVELY
        elif place_of(storage.device) != ledger.device_type:
            kind = ELSEWHERE
        elif operator.foreign and not memory.is_ours(storage):  # it may wrap an array, for example
            kind = FOREIGN
        outputs.append((where, storage, kind))
    return outputs, unplain


def is_odd(tensor: torch.Tensor, operator: Operator) -> bool:
    """Return whether a result is not a plain tensor over a storage: neither evicted nor recomputed from."""
    odd: bool = tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor()
    return odd or operator.keeps_state
