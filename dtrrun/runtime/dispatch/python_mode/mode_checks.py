"""Hides the dispatch mode from those gradient formulas of PyTorch that compute differently under one.

Their C++ asks `isTensorSubclassLike`, which a mode makes true for every tensor, and then avoids in-place
operators and data-dependent branches: the same mathematics, but different bits, and sometimes a missing
error. So for these nodes of the autograd graph our mode is disabled, with all that they read locked in
memory. What they return is a constant, which stays in memory until it dies. Nodes are searched before each
backward pass, but only once an operator with such a formula has run. No longer needed once PyTorch asks only
the tensor.

The program's own code that runs at such a node has the mode: its hooks before and after the node, and those
that unpack its saved tensors (`unpacking`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dtrrun.runtime.dispatch.python_mode.threads import mode_of
from dtrrun.runtime.dispatch.python_mode.unpacking import Unpacking, saved_by
from dtrrun.runtime.guards import any_like_a_subclass
from dtrrun.runtime.patches.engine import nodes_behind, replace_entrance
from dtrrun.runtime.patches.functions import Locker
from dtrrun.runtime.tracebacks import hide

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
    *("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"),  # over all elements
)


class Formula:
    """One such node while it runs: our mode is disabled, and what the formula reads is locked."""

    def __init__(self, lock: Locker, tensors: list[torch.Tensor]) -> None:
        self._lock = lock
        self._unlocks = [lock(tensors)]
        self.off = False
        self.switch_off()

    def switch_off(self) -> None:
        self._entered = _C._pop_torch_dispatch_stack(None)
        self.off = True

    def switch_on(self) -> None:
        if self.off:
            self.off = False
            _C._push_on_torch_dispatch_stack(self._entered)

    def unpack(self, hook: Any, packed: Any) -> Any:
        """Run a hook of the program with the mode on, and keep its result in memory for the formula."""
        self.switch_on()
        found = hook(packed)  # if it raises, so does the node, and the engine restores the modes
        tensors = _tensors(found)
        self._unlocks.append(self._lock(tensors))
        if not any_like_a_subclass(tensors):
            self.switch_off()
        return found

    def unlock(self) -> None:
        while self._unlocks:
            self._unlocks.pop()()


class ModeChecks:
    """Patches the entrance to the autograd engine while installed. met: whether to search for such nodes."""

    def __init__(self, lock: Locker, mode: Any, met: Callable[[], bool]) -> None:
        self._lock = lock
        self._mode = mode
        self._met = met
        self._unpacking = Unpacking(self._unpack)
        self._under_way: dict[int, list[Formula]] = {}  # by thread, innermost last

    def install(self) -> None:
        met = self._met

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not met():
                return self._original(outputs, *args, **kwargs)
            begun: list[tuple[int, Formula]] = []
            handles = [handle for node in _nodes(outputs) for handle in self._guard(node, begun)]
            try:
                return self._original(outputs, *args, **kwargs)
            except BaseException as error:
                hide(error)
                raise
            finally:
                for handle in handles:
                    handle.remove()
                while begun:  # a node raised; the engine has restored the modes
                    self._end(*begun.pop())

        self._original = replace_entrance(run)
        self._unpacking.install()

    def remove(self) -> None:
        self._unpacking.remove()
        replace_entrance(self._original)

    def _guard(self, node: Any, begun: list[tuple[int, Formula]]) -> Iterator[Any]:
        """Install hooks around one node. `begun` holds the formulas that have not ended."""
        own: list[tuple[int, Formula]] = []

        def before(gradients: Any) -> None:
            if _C._len_torch_dispatch_stack() != 1 or mode_of(_C._get_dispatch_stack_at(0)) is not self._mode:
                return  # with a mode of the program, PyTorch computes so without us, too
            hooks = first.hooks_dict_ref()
            if hooks is not None and next(reversed(hooks)) != first.id:
                return  # the program has added a later hook, which needs the mode
            tensors = [*saved_by(node), *_tensors(gradients)]
            if any_like_a_subclass(tensors):
                return
            thread = threading.get_ident()
            formula = Formula(self._lock, tensors)
            self._under_way.setdefault(thread, []).append(formula)
            own.append((thread, formula))
            begun.append(own[-1])

        def after(_results: Any, _gradients: Any) -> None:
            if own:
                thread, formula = own.pop()
                begun.remove((thread, formula))
                formula.switch_on()
                self._end(thread, formula)

        first = node.register_prehook(before)
        last = node.register_hook(after)
        _move_to_front(last)
        yield first
        yield last

    def _end(self, thread: int, formula: Formula) -> None:
        formula.unlock()
        formulas = self._under_way[thread]
        formulas.remove(formula)
        if not formulas:
            del self._under_way[thread]

    def _unpack(self, hook: Any, packed: Any) -> Any:
        formulas = self._under_way.get(threading.get_ident())
        if formulas and formulas[-1].off:
            return formulas[-1].unpack(hook, packed)
        return hook(packed)


def _nodes(outputs: Iterable[Any]) -> list[Any]:
    """Return all nodes with such a formula in the graph behind `outputs` (tensors or gradient edges)."""
    return [node for node in nodes_behind(outputs) if node.name().startswith(NODES)]


def _move_to_front(handle: Any) -> None:
    """Make a hook run before the existing ones: PyTorch calls them in dictionary order."""
    hooks = handle.hooks_dict_ref()
    if len(hooks) > 1:
        others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
        own = hooks[handle.id]
        hooks.clear()  # not `move_to_end`: C++ reads the underlying dictionary
        hooks[handle.id] = own
        hooks.update(others)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, tuple) else []
