"""Before PyTorch 2.10 a storage that was found through a weak reference does not stay because it was found.

There the Python object of a storage belongs to the tensors, and loses its memory with the last of them even
while we hold it ("Got a null Storage"), unless `_fix_weakref` has been called, which makes it ours. No longer
needed once 2.10 is the least that we run with.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dtrrun.ledger.record import Record

_fix: Any = torch._C.StorageBase._fix_weakref  # type: ignore[attr-defined]


def _call(record: Record) -> Any:
    storage = weakref.ref.__call__(record)
    if isinstance(storage, torch.UntypedStorage):
        _fix(storage)
    return storage


def install() -> None:
    """Have a record give its storage for good, where PyTorch does not see to that."""
    if torch.__version__ < "2.10":
        Record.__call__ = _call  # type: ignore[assignment,method-assign]
