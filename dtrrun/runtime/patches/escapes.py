"""Access to a tensor's memory by functions that are not operators: patched while a session runs.

On an evicted tensor, `data_ptr()` would be an address without memory (on a GPU, 0), and so would `numpy()`'s.
So each of these first makes the storage resident. Functions that hand out memory also pin it, and replays no
longer read from it, since other code may write there unnoticed. Patching class attributes costs other tensors
nothing. Needed as long as PyTorch has no hook for reads of a storage's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.jit._script import RecursiveScriptModule

from dtrrun.runtime.access import Access
from dtrrun.runtime.patches.passing import FUNCTIONS as PASSING
from dtrrun.runtime.patches.passing import (
    TAKE_STORAGES,
    is_asked_for_facts,
    is_read,
    passing,
    until_return,
)
from dtrrun.runtime.patches.registry import Function, Patches, caller

READS = ("tolist", "__reduce_ex__")
"""These read the memory while they run."""

NUMBERS = ("__float__", "__int__", "__index__", "__bool__", "__complex__")
"""These read one element through an operator.

But constructors and indexing call them for each tensor in a nested list, and run that operator below all
modes.
"""

WRITES = ("apply_", "map_", "map2_")
"""These write to the memory while they run."""

EXPOSES = (
    "data_ptr",
    "numpy",
    "__array__",
    "__dlpack__",
    "untyped_storage",
    "storage",
    "_typed_storage",
    "share_memory_",
    "__cuda_array_interface__",
)
"""These hand out the memory."""

EXPOSING_FUNCTIONS = ((torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"))
"""One function under three names."""

SCRIPTS_SAVED = (
    "save",
    "save_to_buffer",
    "_save_for_lite_interpreter",
    "_save_to_buffer_for_lite_interpreter",
)
"""Methods of scripted modules that write the memory of their tensors to a file, in C++."""

OF_STORAGES = ("nbytes", "_write_file", "_set_from_file")
"""Methods of storages that `torch.save` and `torch.load` call when, or before, they access the memory."""

STATES: tuple[tuple[Any, str], ...] = ((torch.random, "set_rng_state"), (torch.cuda, "set_rng_state"))
"""These read the state of a random generator from a tensor. `Generator.set_state` cannot be replaced."""

KERNELS = ((torch._C, "_cuda_jiterator_compile_and_launch_kernel"),)
"""These run a kernel on the memory of tensors without any operator."""

_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_PYTHON = torch._C.DispatchKey.Python


class Escapes:
    """The patches of one session."""

    def __init__(self, access: Access) -> None:
        self._access, self._reach = access, access.reach
        self._patches = Patches()

    def install(self) -> None:
        for name in READS:
            self._wrap(torch.Tensor, name, writes=False, exposes=False)
        for name in NUMBERS:
            self._patches.wrap(torch.Tensor, name, self._below_modes)
        for name in WRITES:
            self._wrap(torch.Tensor, name, writes=True, exposes=False)
        for name in EXPOSES:
            self._wrap(torch.Tensor, name, writes=True, exposes=True)
        for owner, name in STATES:
            self._wrap(owner, name, writes=False, exposes=False)
        for owner, name in PASSING:
            self._wrap(owner, name, writes=False, exposes=False, around=passing)
        for name in SCRIPTS_SAVED:
            self._patches.wrap(RecursiveScriptModule, name, self._saved)
        for name in OF_STORAGES:
            self._patches.wrap(torch.UntypedStorage, name, self._passed)
        for owner, name in KERNELS:
            self._patches.wrap(owner, name, self._launched, optional=True)  # in a PyTorch for GPUs
        [(owner, name), *aliases] = EXPOSING_FUNCTIONS
        self._wrap(owner, name, *aliases, writes=True, exposes=True)

    def remove(self) -> None:
        self._patches.undo()

    def _wrap(
        self,
        owner: Any,
        name: str,
        *aliases: tuple[Any, str],
        writes: bool,
        exposes: bool,
        around: Callable[[], Any] = nullcontext,
    ) -> None:
        takes_storage = name in TAKE_STORAGES

        def make(original: Function) -> Function:
            def patched(*args: Any, **kwargs: Any) -> Any:
                if takes_storage and (ends := until_return()) is not None:
                    self._one_by_one(ends)
                    ends.append(self._reach(args[0], False, False))
                    return original(*args, **kwargs)
                if takes_storage and is_asked_for_facts(caller()):
                    with passing():
                        return original(*args, **kwargs)
                ends = []
                try:
                    handed = writes and not (exposes and is_read(caller()))
                    for arg in (*args, *kwargs.values()):
                        if isinstance(arg, torch.Tensor):
                            ends.append(self._reach(arg, handed, exposes))
                    with around():
                        return original(*args, **kwargs)
                finally:  # nothing stays locked, whatever raises
                    for end in ends:
                        end()

            return patched

        self._patches.wrap(owner, name, make, *aliases)

    def _one_by_one(self, ends: list[Callable[[], None]]) -> None:
        """Release what has been taken before, if not all of it need fit into the budget."""
        while ends and self._access.constants_leave:
            ends.pop()()

    def _passed(self, original: Function) -> Function:
        def patched(storage: torch.UntypedStorage, *args: Any) -> Any:
            if (ends := until_return()) is not None and self._access.constants_leave:
                self._one_by_one(ends)
                ends.append(self._access.lock_storage(storage, writes=original.__name__ == "_set_from_file"))
            return original(storage, *args)

        return patched

    def _saved(self, original: Function) -> Function:
        def patched(module: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = (*module.parameters(), *module.buffers())
            return self._reading(tensors, lambda: original(module, *args, **kwargs))

        return patched

    def _launched(self, original: Function) -> Function:
        def patched(*args: Any) -> Any:
            lists = [arg for arg in args if isinstance(arg, (tuple, list))]
            tensors = [one for arg in lists for one in arg if isinstance(one, torch.Tensor)]
            return self._reading(tensors, lambda: original(*args))

        return patched

    def _reading(self, tensors: Iterable[torch.Tensor], call: Callable[[], Any]) -> Any:
        ends = []
        try:
            for tensor in tensors:
                ends.append(self._reach(tensor, False, False))
            return call()
        finally:
            for end in ends:
                end()

    def _below_modes(self, original: Function) -> Function:
        reach = self._reach

        def patched(tensor: torch.Tensor) -> Any:
            if not _is_excluded(_PYTHON):  # then the operator reaches us
                return original(tensor)
            end = reach(tensor, False, False)
            try:
                return original(tensor)
            finally:
                end()

        return patched
