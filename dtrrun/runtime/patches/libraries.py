"""Operators whose kernels a program removes or replaces while it runs.

A notebook defines a custom operator anew; a library of kernels overrides PyTorch's own within a context. What
the earlier kernels have made cannot be made again by the later ones, so it is brought back before, and stays.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.library

from dtrrun.runtime.access import unseen
from dtrrun.runtime.dispatch.python_mode.threads import joins
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.patches.registry import Function, Patches


class Libraries:
    """Watches `torch.library.Library` while installed."""

    def __init__(self, slow_path: SlowPath) -> None:
        self._slow_path = slow_path
        self._patches = Patches()

    def install(self) -> None:
        self._patches.wrap(torch.library.Library, "impl", self._registering)
        self._patches.wrap(torch.library.Library, "_destroy", self._destroying)

    def remove(self) -> None:
        self._patches.undo()

    def _registering(self, original: Function) -> Function:
        def impl(library: Any, op_name: Any, *args: Any, **kwargs: Any) -> Any:
            name = op_name if isinstance(op_name, str) else op_name._schema.name
            self._about_to_change({_named(library.ns, name.rpartition("::")[2])})
            return original(library, op_name, *args, **kwargs)

        return impl

    def _destroying(self, original: Function) -> Function:
        def destroy(library: Any) -> Any:
            defined = [name.partition("::")[2] for name in library._op_defs]
            replaced = [key.split("/")[1] for key in library._op_impls]
            self._about_to_change({_named(library.ns, name) for name in (*defined, *replaced)})
            return original(library)

        return destroy

    def _about_to_change(self, names: set[str]) -> None:
        slow_path = self._slow_path
        if not any(operator.name in names for operator in [*slow_path.operators.values()]):
            return  # none of them has run
        joins()
        with unseen(), slow_path.lock, slow_path.telling():
            slow_path.dtr.mutation.operators_change(names)


def _named(namespace: str, name: str) -> str:
    """Return the name of an operator, without its overload, as in `Operator.name`."""
    return f"{namespace}.{name.partition('.')[0]}"
