"""Code that takes storages from tensors, but keeps none.

`torch.save` and `copy.deepcopy` ask a tensor for its storage. That normally counts as a permanent escape,
since the program may keep it and write to it unnoticed: nothing is recomputed from it any more. After the
first checkpoint of a training run, that would apply to all parameters. What these functions take stays in
memory only until they return. `torch.load` makes tensors over storages that no other code holds.

Other code takes a storage only to ask for its size: each jagged nested tensor is made so.
"""

from __future__ import annotations

import dis
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
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
"""Modules whose functions compare addresses or write memory to a file, but never write to the memory.

What they receive must not move, but replays may still read it.
"""

FACTS = frozenset(("_cdata", "_size", "device", "element_size", "is_cuda", "nbytes", "size"))
"""Attributes of a storage that give no access to its memory."""
_READING_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")

_here = threading.local()


@contextmanager
def passing() -> Iterator[None]:
    """Context for a call of one of `FUNCTIONS` in this thread."""
    if until_return() is not None:  # nested: the outermost releases them
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
    """Return whether memory is handed out to one of `READERS`. frame: of the function that asks for it."""
    return frame.f_globals.get("__name__") in READERS


def is_asked_for_facts(frame: FrameType) -> bool:
    """Return whether all that happens to a storage is that one of `FACTS` is read from it.

    frame: of the function that is taking the storage from a tensor.
    """
    return _attribute_read(frame.f_code, frame.f_lasti) in FACTS


@functools.lru_cache(maxsize=256)
def _attribute_read(code: CodeType, place: int) -> str:
    """Return the attribute that is read next, from the result of the call at this place in the code.

    "" if something else is done with it.
    """
    made = ""
    for one in dis.get_instructions(code):
        if one.offset > place:  # of the call or, from Python to Python, of the last entry of its cache
            reads = made.startswith("CALL") and one.opname in _READING_ATTRIBUTES
            return str(one.argval) if reads else ""
        made = one.opname
    return ""


def until_return() -> list[Callable[[], None]] | None:
    """Return this thread's functions to call at the return; None if none of `FUNCTIONS` is running."""
    ends: list[Callable[[], None]] | None = getattr(_here, "ends", None)
    return ends
