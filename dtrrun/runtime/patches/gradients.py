"""Pins weights once modules and optimizers have them, and gradients of leaves as they arrive.

The program reads gradients soon, when the weights that a replay would need have begun to change. Leaves are
found when modules and optimizers register them, and when an operator receives one that is new to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from dtrrun.runtime.access import unseen
from dtrrun.runtime.dispatch.arguments import is_leaf
from dtrrun.runtime.patches.registry import Function, Patches


class Gradients:
    """Hooks on leaves. `pin` is called with each gradient once it has been accumulated."""

    def __init__(
        self,
        pin: Callable[[torch.Tensor, str], None],
        keep: Callable[[torch.Tensor], None],
        native: Any,
        own: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """keep: called with each weight. native: the extension, for speed: thousands of gradients arrive in a
        step. own: returns a context for what is our own work."""
        self._pin, self._keep, self._own = pin, keep, own
        self._patches = Patches()
        # A single object, so that it can be found among a leaf's hooks.
        self._hook = native.gradient_hook(self._arrived)
        self._handles: list[Any] = []
        self._prune_at = 64
        self.optimizers = 0  # number of parameter groups added to any optimizer

    def install(self) -> None:
        def registered(_module: Any, _name: str, parameter: Any) -> None:
            if parameter is not None:
                with self._own():
                    self._registered(parameter)

        self._registration = register_module_parameter_registration_hook(registered)
        self._patches.wrap(torch.optim.Optimizer, "add_param_group", self._adding)

    def _adding(self, original: Function) -> Function:
        def add_param_group(optimizer: Any, param_group: dict[str, Any]) -> None:
            original(optimizer, param_group)
            self.optimizers += 1
            with self._own():
                for parameter in param_group["params"]:
                    self._registered(parameter)

        return add_param_group

    def remove(self) -> None:
        self._patches.undo()
        self._registration.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _registered(self, parameter: torch.Tensor) -> None:
        self.watch(parameter)
        with unseen():
            trained = parameter.requires_grad and is_leaf(parameter)
        if trained and not torch.nn.parameter.is_lazy(parameter):
            self._keep(parameter)

    def watch(self, leaf: torch.Tensor) -> None:
        """Pin every gradient of `leaf` when it arrives."""
        with unseen():
            self._watch(leaf)

    def _watch(self, leaf: torch.Tensor) -> None:
        if not (leaf.requires_grad and is_leaf(leaf)) or torch.nn.parameter.is_lazy(leaf):
            return  # a lazy parameter will reach an operator once it has a size
        # Not a weak reference: that would make `torch.utils.swap_tensors` fail.
        present: Any = getattr(leaf, "_post_accumulate_grad_hooks", None)
        if present and any(hook is self._hook for hook in present.values()):
            return
        try:
            self._handles.append(leaf.register_post_accumulate_grad_hook(self._hook))
        except RuntimeError:  # a subclass or a device without such hooks: its gradients stay evictable
            return
        if len(self._handles) > self._prune_at:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._prune_at = 2 * len(self._handles) + 64

    def _arrived(self, leaf: torch.Tensor) -> None:
        with unseen():
            gradient = leaf.grad
        if gradient is not None:
            self._pin(gradient, "gradient")
