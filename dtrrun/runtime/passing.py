"""Where PyTorch's own Python code takes storages from tensors and has let go of them when it returns.

`torch.save` and `copy.deepcopy` ask a tensor for its storage. That counts as handed out for good, since the
program may keep it and write to it unseen: nothing is recomputed from it any more, and after the first
checkpoint of a training that would be from no parameter. What these functions take stays in memory until
they return, and no longer. `torch.load` makes tensors over storages that nobody else has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch, "save"),
    (torch.serialization, "save"),
    (torch, "load"),
    (torch.serialization, "load"),
    (torch.Tensor, "__deepcopy__"),
)

TAKE_STORAGES = ("untyped_storage", "storage", "_typed_storage")
"""Methods of tensors that hand out a storage, rather than its memory."""

_here = threading.local()


@contextmanager
def passing() -> Iterator[None]:
    """While one of `FUNCTIONS` runs in this thread."""
    if until_return() is not None:  # one within another: the outermost lets go
        yield
        return
    ends: list[Callable[[], None]] = []
    _here.ends = ends
    try:
        yield
    finally:
        _here.ends = None
        for end in ends:
            end()


def until_return() -> list[Callable[[], None]] | None:
    """What this thread is to call when the function returns; None: it runs none of `FUNCTIONS`."""
    ends: list[Callable[[], None]] | None = getattr(_here, "ends", None)
    return ends
