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
from types import FrameType
from typing import Any

import torch

FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch.serialization, "save"),
    (torch.serialization, "load"),
    (torch.Tensor, "__deepcopy__"),
)

TAKE_STORAGES = ("untyped_storage", "storage", "_typed_storage")
"""Methods of tensors that hand out a storage, rather than its memory."""

READERS = frozenset(
    (
        "accelerate.utils.modeling",
        "accelerate.utils.other",
        "huggingface_hub.serialization._torch",
        "safetensors.torch",
        "torch._tensor",  # pickling, `is_shared`
        "torch.nn.modules.rnn",  # `flatten_parameters`
        "transformers.modeling_utils",
        "transformers.pytorch_utils",
    )
)
"""Modules whose functions compare addresses or write to a file what is there, but never write there.

What they are handed has to stay where it is, and things can be recomputed from it."""

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


def is_read(frame: FrameType) -> bool:
    """Whether memory is handed out to one of `READERS`; frame: of the function that asks for it."""
    return frame.f_globals.get("__name__") in READERS


def until_return() -> list[Callable[[], None]] | None:
    """What this thread is to call when the function returns; None: it runs none of `FUNCTIONS`."""
    ends: list[Callable[[], None]] | None = getattr(_here, "ends", None)
    return ends
