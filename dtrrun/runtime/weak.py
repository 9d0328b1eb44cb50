"""Keeps alive a storage found through a weak reference, which PyTorch before 2.10 does not.

There the Python object of a storage belongs to the tensors, and loses its memory with the last of them even
while we hold it ("Got a null Storage"), unless `_fix_weakref` has been called, which gives us ownership. No
longer needed once the minimum version is 2.10.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dtrrun.core.graph import Version

_fix: Any = torch._C.StorageBase._fix_weakref  # type: ignore[attr-defined]


def _call(version: Version) -> Any:
    storage = weakref.ref.__call__(version)
    if isinstance(storage, torch.UntypedStorage):
        _fix(storage)
    return storage


def install() -> None:
    """Make a version return a storage with ownership, if PyTorch does not do so."""
    if torch.__version__ < "2.10":
        Version.__call__ = _call  # type: ignore[assignment,method-assign]
