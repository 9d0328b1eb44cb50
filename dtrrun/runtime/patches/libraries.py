"""Pins the results of operators whose kernels the program removes or replaces while it runs.

A notebook redefines a custom operator; a kernel library overrides PyTorch's own within a context. The new
kernels cannot recompute what the old ones have made, so that is brought back first, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.library
from torch._library.custom_ops import CustomOpDef

from dtrrun.runtime.access import unseen
from dtrrun.runtime.dispatch import kernels
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.dispatch.threads import joins
from dtrrun.runtime.patches.registry import Function, Patches


class Libraries:
    """Watches `torch.library` while installed."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._patches = Patches()
        self._forgotten: list[tuple[set[str], Callable[[], None]]] = []
        """Libraries that the program no longer has: the operators of each, and what removes them.

        Python may finalize them at any moment, even in the middle of our own work. So they stay until the
        program makes or changes a library.
        """
        self._destroyed: dict[int, Any] = {}  # by id

    def install(self) -> None:
        library = torch.library.Library
        self._patches.wrap(torch._C, "_dispatch_library", self._changing)  # a new one
        self._patches.wrap(library, "define", self._changing)
        self._patches.wrap(library, "impl", self._registering)
        self._patches.wrap(library, "_destroy", self._destroying)
        self._patches.wrap(torch.library, "_del_library", self._forgetting)
        self._patches.wrap(CustomOpDef, "register_kernel", self._registering_kernel)
        self._patches.wrap(CustomOpDef, "set_kernel_enabled", self._enabling_kernel)

    def remove(self) -> None:
        self._patches.undo()
        self._destroyed.clear()
        while self._forgotten:
            self._forgotten.pop()[1]()

    # -- what is called in place of PyTorch's ----------------------------------------------------------

    def _changing(self, original: Function) -> Function:
        def change(*args: Any, **kwargs: Any) -> Any:
            self._about_to_change(set())
            return original(*args, **kwargs)

        return change

    def _registering(self, original: Function) -> Function:
        def impl(library: Any, op_name: Any, *args: Any, **kwargs: Any) -> Any:
            name = op_name if isinstance(op_name, str) else op_name._schema.name
            names = {_named(f"{library.ns}::{name.rpartition('::')[2]}")}
            self._about_to_change(names)
            made = original(library, op_name, *args, **kwargs)
            _note(library, op_name, *args, **kwargs)
            self._callbacks.learn_anew(names)
            return made

        return impl

    def _destroying(self, original: Function) -> Function:
        def destroy(library: Any) -> Any:
            names = _names(library._op_defs, library._op_impls)
            self._about_to_change(names)
            if library.m is not None:
                self._destroyed[id(library.m)] = library.m
            original(library)
            self._callbacks.learn_anew(names)

        return destroy

    def _forgetting(self, original: Function) -> Function:
        def forget(
            impls: Any, op_impls: Any, defs: Any, op_defs: Any, handles: Any, m: Any, *more: Any
        ) -> Any:
            names = _names(op_defs, op_impls)
            if self._destroyed.pop(id(m), None) is not None or not self._have_run(names):
                return original(impls, op_impls, defs, op_defs, handles, m, *more)
            given = impls, op_impls, defs, op_defs, handles, m, *more
            self._forgotten.append((names, lambda: original(*given)))
            return None

        return forget

    def _registering_kernel(self, original: Function) -> Function:
        def register_kernel(custom: Any, *args: Any) -> Any:
            self._about_to_change({_named(custom._qualname)})
            return original(custom, *args)

        return register_kernel

    def _enabling_kernel(self, original: Function) -> Function:
        @contextmanager
        def set_kernel_enabled(custom: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            names = {_named(custom._qualname)}
            self._about_to_change(names)
            with original(custom, *args, **kwargs):
                try:
                    yield
                finally:
                    self._about_to_change(names)

        return set_kernel_enabled

    # -- what has been made ----------------------------------------------------------------------------

    def _have_run(self, names: set[str]) -> bool:
        return any(operator.name in names for operator in [*self._callbacks.operators.values()])

    def _about_to_change(self, names: set[str]) -> None:
        """Bring back what operators with these names have made, and remove forgotten libraries.

        Raises the budget error.
        """
        callbacks = self._callbacks
        forgotten, self._forgotten = self._forgotten, []
        callbacks.readings.clear()
        names = names.union(*(removed for removed, _ in forgotten))
        try:
            if self._have_run(names):
                joins()
                with unseen(), callbacks.lock, callbacks.telling():
                    callbacks.dtr.mutation.operators_change(names)
        except BaseException:
            self._forgotten += forgotten
            raise
        for removed, remove in forgotten:
            remove()
            callbacks.learn_anew(removed)


def _note(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **_: Any) -> None:
    """Note a kernel that `Library.impl` has registered with these arguments."""
    if isinstance(op_name, str):
        name = op_name.rpartition("::")[2]
    else:
        name = ".".join(
            filter(None, (op_name._schema.name.rpartition("::")[2], op_name._schema.overload_name))
        )
    key = dispatch_key or library.dispatch_key or "CompositeImplicitAutograd"
    kernels.note(f"{library.ns}/{name}/{key}", fn)


def _named(qualified: str) -> str:
    """Return the name of an operator, without its overload, as in `Operator.name`."""
    namespace, _, name = qualified.partition("::")
    return f"{namespace}.{name.partition('.')[0]}"


def _names(op_defs: set[str], op_impls: set[str]) -> set[str]:
    """Return the names of what a library defines and implements."""
    implemented = [key.split("/") for key in op_impls]
    return {_named(name) for name in (*op_defs, *(f"{one[0]}::{one[1]}" for one in implemented))}
