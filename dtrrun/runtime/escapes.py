"""Ways to a tensor's memory that are no operator: patched on `torch.Tensor` while a session runs.

On an evicted tensor `data_ptr()` is 0 and `numpy()` an array over nothing, so each of these first brings the
storage back. What hands out memory also pins it, and replays no longer read from it: other code may write
there unseen. Class attributes cost the other tensors nothing. Needed as long as PyTorch has no hook for reads
of a storage's memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dtrrun.runtime.guards import only_our_mode, without_our_mode
from dtrrun.runtime.passing import FUNCTIONS as PASSING
from dtrrun.runtime.passing import TAKE_STORAGES, is_read, passing, until_return
from dtrrun.runtime.tracebacks import hide

READS = ("__repr__", "tolist", "__reduce_ex__", "__format__")
"""Read the memory while they run (`repr` by operators, but with all modes switched off)."""

WRITES = ("apply_", "map_", "map2_")
"""Write to it while they run."""

EXPOSES = (
    "data_ptr",
    "numpy",
    "__array__",
    "__dlpack__",
    "untyped_storage",
    "storage",
    "_typed_storage",
    "share_memory_",
)
"""Hand it out."""

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "_pad_packed_sequence")
READ_BY_COMPOSITES = (
    *((torch._VF, name) for name in _RECURRENT),
    *((torch, name) for name in _RECURRENT),
    (torch, "tensor_split"),
    (torch.Tensor, "tensor_split"),
    (torch, "ctc_loss"),
)
"""Composite operators that look into an integer tensor (lengths, split points) before any operator runs."""

WRITTEN_BY_COMPOSITES = tuple(
    (torch, name)
    for name in (
        "_sobol_engine_draw",
        "_sobol_engine_ff_",
        "_sobol_engine_initialize_state_",
        "_sobol_engine_scramble_",
    )
)
"""Also read the memory of intermediates of their own: they run with the mode switched off."""

_LINALG = ("cond", "eigvals", "eigvalsh", "matrix_norm", "matrix_rank", "norm", "svdvals")
ASK_FOR_MODES = (
    *((torch.linalg, name) for name in _LINALG),
    *((owner, name) for owner in (torch, torch._VF) for name in ("nuclear_norm", "svd")),
    (torch.Tensor, "svd"),
)
"""Composites that ask whether a mode is on, and then compute singular vectors, too, which gives other bits.

With `out=` they write something else there, or nothing (PyTorch 2.13). Our mode is off for them, unless a
gradient asks for the same."""

CONSTRUCTORS = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (torch.Tensor, "new_tensor"))
"""Read the elements of a list of tensors below every mode."""

STATES: tuple[tuple[Any, str], ...] = (
    (torch, "set_rng_state"),
    (torch.random, "set_rng_state"),
    (torch.cuda, "set_rng_state"),
)
"""Read the state of a random generator from a tensor. `Generator.set_state` itself cannot be replaced."""

PATCHED = (*STATES, *PASSING, *READ_BY_COMPOSITES, *WRITTEN_BY_COMPOSITES, *ASK_FOR_MODES, *CONSTRUCTORS)
"""All functions, by their owner and name."""

EXPOSING_PROPERTIES = ("__cuda_array_interface__",)
EXPOSING_FUNCTIONS = ((torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack"))

Reach = Callable[[torch.Tensor, bool, bool], Callable[[], None]]
"""reach(tensor, writes, exposes) makes the memory safe to touch; returns what ends that.

What is exposed without being written to stays in memory, and is recomputed from."""


class Escapes:
    """The patches of one session; `reach` is called before each access."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        for name in READS:
            self._patch(torch.Tensor, name, writes=False, exposes=False)
        for name in WRITES:
            self._patch(torch.Tensor, name, writes=True, exposes=False)
        for name in EXPOSES:
            self._patch(torch.Tensor, name, writes=True, exposes=True)
        for owner, name in STATES:
            self._patch(owner, name, writes=False, exposes=False)
        for owner, name in PASSING:
            self._patch(owner, name, writes=False, exposes=False, around=passing)
        for owner, name in READ_BY_COMPOSITES:
            self._patch(owner, name, writes=False, exposes=False, integers_only=True)
        for owner, name in WRITTEN_BY_COMPOSITES:
            self._patch(owner, name, writes=True, exposes=False, around=_disable_current_modes)
        for owner, name in ASK_FOR_MODES:
            self._patch_asking(owner, name)
        for owner, name in CONSTRUCTORS:
            self._patch(owner, name, writes=False, exposes=False, nested=True)
        for owner, name in EXPOSING_FUNCTIONS:
            self._patch(owner, name, writes=True, exposes=True)
        for name in EXPOSING_PROPERTIES:
            self._patch_property(torch.Tensor, name)

    def remove(self) -> None:
        while self._undo:
            owner, name, original = self._undo.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _patch(
        self,
        owner: Any,
        name: str,
        *,
        writes: bool,
        exposes: bool,
        integers_only: bool = False,
        nested: bool = False,
        around: Callable[[], Any] = nullcontext,
    ) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        call = self._call
        takes_storage = name in TAKE_STORAGES

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            touched = (*args, *kwargs.values())
            if takes_storage and (ends := until_return()) is not None:
                ends.append(self._reach(args[0], False, False))
                return original(*args, **kwargs)
            if nested:
                touched = (*touched, *(item for arg in touched for item in _elements(arg)))
            handed = writes and not (exposes and is_read(sys._getframe(1)))
            reaches = [
                (arg, handed, exposes)
                for arg in touched
                if isinstance(arg, torch.Tensor) and not (integers_only and arg.is_floating_point())
            ]
            try:
                return call(original, args, kwargs, reaches, around)
            except BaseException as error:
                hide(error)
                raise

        self._replace(owner, name, patched)

    def _patch_asking(self, owner: Any, name: str) -> None:
        original, call = getattr(owner, name), self._call

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
            out = kwargs.get("out")
            graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            if (graph and out is None) or not only_our_mode():
                return original(*args, **kwargs)
            reaches = [(tensor, tensor is out, False) for tensor in tensors]
            try:
                return call(original, args, kwargs, reaches, without_our_mode)
            except BaseException as error:
                hide(error)
                raise

        self._replace(owner, name, patched)

    def _call(
        self,
        original: Any,
        args: Any,
        kwargs: Any,
        reaches: list[tuple[torch.Tensor, bool, bool]],
        around: Callable[[], Any],
    ) -> Any:
        """Call `original` with all that it touches in memory; nothing stays locked, whatever raises."""
        ends: list[Callable[[], None]] = []
        try:
            for reach in reaches:
                ends.append(self._reach(*reach))
            with around():
                return original(*args, **kwargs)
        finally:
            for end in ends:
                end()

    def _replace(self, owner: Any, name: str, patched: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, patched)

    def _patch_property(self, owner: Any, name: str) -> None:
        original = owner.__dict__.get(name)
        if not isinstance(original, property) or original.fget is None:
            return
        reach, read = self._reach, original.fget

        def patched(tensor: torch.Tensor) -> Any:
            try:
                reach(tensor, True, True)()
                return read(tensor)
            except BaseException as error:
                hide(error)
                raise

        self._undo.append((owner, name, original))
        setattr(owner, name, property(patched, doc=original.__doc__))


def _elements(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists; a list that begins with a number is not searched."""
    if not isinstance(value, (list, tuple)) or not value:
        return []
    if isinstance(value[0], torch.Tensor):
        return [item for item in value if isinstance(item, torch.Tensor)]
    if isinstance(value[0], (list, tuple)):
        return [tensor for item in value for tensor in _elements(item)]
    return []
