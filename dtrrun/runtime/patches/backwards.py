"""Detects the steps and the gradients of programs without an optimizer.

Such a program updates its weights itself, often by making new ones (`torch.func`, weights in a list). Only
the end of a backward pass separates its steps. Nothing else shows which results are gradients, and
recomputing an evicted gradient replays the whole step. The engine's entry point is watched as long as no
optimizer has been made. No longer needed once PyTorch has hooks around backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from dtrrun.runtime.patches.engine import nodes_behind, put_entrance, replace_entrance
from dtrrun.runtime.patches.registry import Function

_C: Any = torch._C
_F: Any = torch._C._functorch


class Backwards:
    """Patches the autograd engine's entry point while installed.

    wanted: whether there is no optimizer. pin: called with each gradient as it arrives, and the reason.
    watch: called with each leaf that will accumulate a gradient. ended: called after the last pass through a
    graph. own: returns a context for what is our own work.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        pin: Callable[[torch.Tensor, str], None],
        watch: Callable[[torch.Tensor], None],
        ended: Callable[[], None],
        own: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._wanted, self._pin, self._watch, self._ended, self._own = wanted, pin, watch, ended, own

    def install(self) -> None:
        self._original = replace_entrance(self._passing)

    def _passing(self, original: Function) -> Function:
        wanted = self._wanted

        def passes(
            outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *args: Any, **more: Any
        ) -> Any:
            def engine() -> Any:
                return original(outputs, gradients, keep, create, inputs, *args, **more)

            if not wanted() or _C._current_graph_task_id() != -1:
                return engine()
            if more.get("accumulate_grad") and not inputs:
                with self._own():
                    for node in nodes_behind(outputs):
                        leaf = getattr(node, "variable", None)  # of AccumulateGrad
                        if isinstance(leaf, torch.Tensor):
                            self._watch(leaf)
            if keep or (create and _functorch_levels() != 1):
                return engine()  # the graph, or that of its gradient, will be used again
            with self._own():
                handles = self._hooks(inputs)
            try:
                result = engine()
            finally:
                for handle in handles:
                    handle.remove()
            with self._own():
                self._ended()
            return result

        return passes

    def remove(self) -> None:
        put_entrance(self._original)

    def _hooks(self, inputs: Iterable[Any]) -> list[Any]:
        """Return hooks that receive gradients with respect to `inputs` when the engine has them."""
        handles = []
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor):
                with suppress(RuntimeError):  # if it needs no gradient, the engine raises
                    handles.append(tensor.register_hook(self._arrived))
        return handles

    def _arrived(self, gradient: Any) -> None:
        while _F.is_functorch_wrapped_tensor(gradient):
            gradient = _F.get_unwrapped(gradient)
        self._pin(gradient, "gradient")


def _functorch_levels() -> int:
    """Return the number of active `torch.func` transforms that differentiate; they always need a graph."""
    return sum(one.key().name in ("Grad", "Jvp") for one in _F.get_interpreter_stack() or ())
