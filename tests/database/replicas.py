"""Copies of sample inputs made by an operator of the session, so that they can be evicted too.

The copies have the geometry of the originals: sizes, strides, offset, and which of them share a storage.
"""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.runtime.storage import storage_of  # a session patches torch.Tensor's own, which would pin


class Replicas:
    """Copies arguments; `leaves` are the copies whose gradients are requested."""

    def __init__(self, *, inner: bool = False) -> None:
        self.inner = inner  # whether copies are not leaves, so that they can be written to in place
        self.leaves: list[torch.Tensor] = []
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        if type(value) is dict:
            return {name: self.of(item) for name, item in value.items()}
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = self._content(tensor.detach())
        if not tensor.requires_grad:
            return made
        leaf = made.requires_grad_()
        self.leaves.append(leaf)
        return leaf.clone() if self.inner else leaf

    def _content(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) is not torch.Tensor:
            return tensor.clone()
        if tensor.is_complex() and tensor.is_conj():
            return self._content(tensor.conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(self._content(torch._neg_view(tensor)))
        storage = storage_of(tensor)
        key = storage._cdata, tensor.dtype
        if key not in self._storages:
            size = storage.nbytes() // tensor.element_size()
            self._storages[key] = tensor.as_strided((size,), (1,), 0).clone()
        return self._storages[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []
