"""Some of PyTorch's gradient formulas compute in another way where any dispatch mode is on.

Their C++ asks `isTensorSubclassLike`, which a mode makes true for every tensor, and then avoids in-place
operators and data-dependent branches: the same mathematics, other bits, and at times no error where there
should be one. So for these nodes of the autograd graph our mode is taken off, with all that they read locked
in memory; what they return is a constant, which stays in memory until it dies. Nodes are found before each
backward pass, and only once an operator with such a formula has run. No longer needed once PyTorch asks the
tensor alone.

A hook of the program's own on such a node, run after it, is not seen by us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dtrrun.runtime.engine import nodes_behind, replace_entrance
from dtrrun.runtime.functions import Locker
from dtrrun.runtime.threads import mode_of

_C: Any = torch._C

NODES = (
    "ProdBackward",
    "CumprodBackward",
    "MaskedFillBackward",
    "LinalgDetBackward",
    "LinalgSlogdetBackward",
    "LinalgEigBackward",
    "LinalgEighBackward",
    "OrmqrBackward",
    "LinalgHouseholderProductBackward",
)


class ModeChecks:
    """Patches the entrance to the autograd engine while installed. `met`: whether to look for such nodes."""

    def __init__(self, lock: Locker, mode: Any, met: Callable[[], bool]) -> None:
        self._lock = lock
        self._mode = mode
        self._met = met

    def install(self) -> None:
        met = self._met

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not met():
                return self._original(outputs, *args, **kwargs)
            locked: list[Callable[[], None]] = []
            handles = [handle for node in _nodes(outputs) for handle in self._guard(node, locked)]
            try:
                return self._original(outputs, *args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()
                while locked:  # a node raised; the engine has put the modes back
                    locked.pop()()

        self._original = replace_entrance(run)

    def remove(self) -> None:
        replace_entrance(self._original)

    def _guard(self, node: Any, locked: list[Callable[[], None]]) -> Iterator[Any]:
        """Hooks around one node; `locked` has what it holds while it runs."""
        held: list[Callable[[], None]] = []
        taken_off: list[Any] = []

        def before(gradients: Any) -> None:
            if _C._len_torch_dispatch_stack() != 1 or mode_of(_C._get_dispatch_stack_at(0)) is not self._mode:
                return  # with a mode of the program's, PyTorch takes the other way without us, too
            held.append(self._lock([*_saved(node), *_tensors(gradients)]))
            locked.append(held[-1])
            taken_off.append(_C._pop_torch_dispatch_stack(None))

        def after(_results: Any, _gradients: Any) -> None:
            if held:
                _C._push_on_torch_dispatch_stack(taken_off.pop())
                unlock = held.pop()
                locked.remove(unlock)
                unlock()

        yield node.register_prehook(before)
        yield node.register_hook(after)


def _nodes(outputs: Iterable[Any]) -> list[Any]:
    """All nodes with such a formula in the graph behind `outputs` (tensors or gradient edges)."""
    return [node for node in nodes_behind(outputs) if node.name().startswith(NODES)]


def _saved(node: Any) -> list[torch.Tensor]:
    """What the node has saved; nothing where it has been freed already (the node will say so)."""
    found: list[torch.Tensor] = []
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                found += _tensors(getattr(node, name))
            except RuntimeError:
                return []
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, tuple) else []
