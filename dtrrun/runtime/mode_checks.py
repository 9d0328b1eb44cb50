"""Some of PyTorch's gradient formulas compute in another way where any dispatch mode is on.

Their C++ asks `isTensorSubclassLike`, which a mode makes true for every tensor, and then avoids in-place
operators and data-dependent branches: the same mathematics, other bits, and at times no error where there
should be one. So for these nodes of the autograd graph our mode is taken off, with all that they read locked
in memory; what they return is a constant, which stays in memory until it dies. Nodes are found before each
backward pass, and only once an operator with such a formula has run. No longer needed once PyTorch asks the
tensor alone.

The program's own code that runs at such a node has the mode: its hooks before and after the node, and what
unpacks the tensors that the node has saved (`unpacking`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dtrrun.runtime.engine import nodes_behind, replace_entrance
from dtrrun.runtime.functions import Locker
from dtrrun.runtime.threads import mode_of
from dtrrun.runtime.tracebacks import hide
from dtrrun.runtime.unpacking import Unpacking, saved_by

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


class Formula:
    """One such node while it runs: our mode is off, and what the formula reads is locked in memory."""

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
        """Run a hook of the program's with the mode on, and keep what the formula gets from it in memory."""
        self.switch_on()
        found = hook(packed)  # if it raises, so does the node, and the engine puts the modes back
        tensors = _tensors(found)
        self._unlocks.append(self._lock(tensors))
        if not _any_like_a_subclass(tensors):
            self.switch_off()
        return found

    def unlock(self) -> None:
        while self._unlocks:
            self._unlocks.pop()()


class ModeChecks:
    """Patches the entrance to the autograd engine while installed. `met`: whether to look for such nodes."""

    def __init__(self, lock: Locker, mode: Any, met: Callable[[], bool]) -> None:
        self._lock = lock
        self._mode = mode
        self._met = met
        self._unpacking = Unpacking(self._unpack)
        self._under_way: dict[int, list[Formula]] = {}  # by thread, the innermost last

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
                while begun:  # a node raised; the engine has put the modes back
                    self._end(*begun.pop())

        self._original = replace_entrance(run)
        self._unpacking.install()

    def remove(self) -> None:
        self._unpacking.remove()
        replace_entrance(self._original)

    def _guard(self, node: Any, begun: list[tuple[int, Formula]]) -> Iterator[Any]:
        """Hooks around one node; `begun` has the formulas that have not ended."""
        own: list[tuple[int, Formula]] = []

        def before(gradients: Any) -> None:
            if _C._len_torch_dispatch_stack() != 1 or mode_of(_C._get_dispatch_stack_at(0)) is not self._mode:
                return  # with a mode of the program's, PyTorch takes the other way without us, too
            hooks = first.hooks_dict_ref()
            if hooks is not None and next(reversed(hooks)) != first.id:
                return  # the program has added a hook since: it comes after this one, and needs the mode
            tensors = [*saved_by(node), *_tensors(gradients)]
            if _any_like_a_subclass(tensors):
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
    """All nodes with such a formula in the graph behind `outputs` (tensors or gradient edges)."""
    return [node for node in nodes_behind(outputs) if node.name().startswith(NODES)]


def _move_to_front(handle: Any) -> None:
    """Have a hook run before those that were there: PyTorch calls them in the order of a dictionary."""
    hooks = handle.hooks_dict_ref()
    if len(hooks) > 1:
        others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
        own = hooks[handle.id]
        hooks.clear()  # `move_to_end` would not do: C++ reads the plain dictionary beneath
        hooks[handle.id] = own
        hooks.update(others)


def _any_like_a_subclass(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether PyTorch takes the other way without any mode, too: for subclasses, and within `torch.func`."""
    ordinary = torch.Tensor.__torch_dispatch__
    return any(
        type(tensor).__torch_dispatch__ not in (ordinary, torch._C._disabled_torch_dispatch_impl)
        or _C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, tuple) else []
