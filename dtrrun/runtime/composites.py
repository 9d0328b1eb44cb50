"""Composite operators that touch memory without an operator have a kernel of ours while a session runs.

Some read an integer tensor by its address (lengths, split points) before any operator runs: it has to be in
memory. Others behave in another way when a dispatch mode is on: they run without one. Our kernels are
registered with the dispatcher, where C++ and TorchScript meet them as Python does, and nothing that Python
sees is replaced. They have autograd's key, for which a composite operator has no kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dtrrun.runtime.access import Reach, unseen
from dtrrun.runtime.guards import only_our_mode, without_our_mode
from dtrrun.runtime.tracebacks import hiding

READ_INTEGERS = (
    "lstm.data",
    "gru.data",
    "rnn_tanh.data",
    "rnn_relu.data",
    "_pad_packed_sequence",
    "tensor_split.tensor_indices_or_sections",
    "ctc_loss.Tensor",
)
"""Read an integer tensor's memory. The others that they are given go to operators."""

WITHOUT_MODES = (
    "_sobol_engine_draw",
    "_sobol_engine_ff_",
    "_sobol_engine_initialize_state_",
    "_sobol_engine_scramble_",
)
"""Touch the memory of all that they are given, and of intermediates of their own."""

_LINALG = ("cond", "eigvals", "eigvalsh", "matrix_norm", "matrix_rank", "norm", "svdvals")
ASK_FOR_MODES = (*(f"linalg_{name}" for name in _LINALG), "nuclear_norm", "svd")
"""Ask whether a mode is on, and then compute singular vectors, too, which gives other bits.

With `out=` they write something else there, or nothing (PyTorch 2.13). Our mode is off for them, unless a
gradient asks for the same."""

Kernel = Callable[..., Any]
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Composites:
    """The kernels of one session, by operator; `reach` is called before each access.

    devices: whose tensors the operators are given, as dispatch keys name them.
    """

    def __init__(self, reach: Reach, *devices: str) -> None:
        self._reach = reach
        self._devices = devices
        self.kernels: dict[Any, Kernel] = {}

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for func in _named(READ_INTEGERS):
            self._register(func, self._reading(func))
        for func in _named(WITHOUT_MODES):
            self._register(func, self._without_modes(func))
        for name in ASK_FOR_MODES:
            for func in _overloads(name):
                self._register(func, self._asking(func))

    def remove(self) -> None:
        self._library._destroy()
        self.kernels.clear()

    def _register(self, func: Any, kernel: Kernel) -> None:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return  # no composite in this PyTorch
        self.kernels[func] = kernel = hiding(kernel)
        for device in self._devices:
            self._library.impl(func, kernel, f"Autograd{device}")

    def _reading(self, func: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with unseen():
                touched = [one for one in _touched(args, kwargs, set()) if not one[0].is_floating_point()]
            return self._run(func, args, kwargs, touched, nullcontext)

        return kernel

    def _without_modes(self, func: Any) -> Kernel:
        is_written = _writes(func)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            touched = _touched(args, kwargs, is_written)
            return self._run(func, args, kwargs, touched, _disable_current_modes)

        return kernel

    def _asking(self, func: Any) -> Kernel:
        is_written = _writes(func)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            touched = _touched(args, kwargs, is_written)
            with unseen():
                graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in touched)
            if (graph and not is_written) or not only_our_mode():
                return self._run(func, args, kwargs, [], nullcontext)
            return self._run(func, args, kwargs, touched, without_our_mode)

        return kernel

    def _run(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        touched: list[tuple[torch.Tensor, bool]],
        around: Callable[[], Any],
    ) -> Any:
        """The composite itself, with what it touches (and may write to) in memory."""
        ends: list[Callable[[], None]] = []
        try:
            for tensor, writes in touched:
                ends.append(self._reach(tensor, writes, False))
            # The operator has been called: a program's function modes have seen it.
            with unseen(), around():
                return func._op_dk(COMPOSITE, *args, **kwargs)
        finally:
            for end in ends:
                end()


def _overloads(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None:
        yield from (getattr(packet, overload) for overload in packet.overloads())


def _named(names: tuple[str, ...]) -> Iterator[Any]:
    """Those of the overloads that this PyTorch has."""
    for name in names:
        packet, _, overload = name.partition(".")
        yield from (func for func in _overloads(packet) if func._overloadname == (overload or "default"))


def _writes(func: Any) -> set[int | str]:
    """The positions and names of the arguments that an operator writes to."""
    written: set[int | str] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    return written


def _touched(args: Any, kwargs: dict[str, Any], written: set[int | str]) -> list[tuple[torch.Tensor, bool]]:
    """The tensors among the arguments, and whether each is written to."""
    return [
        (value, place in written)
        for place, value in (*enumerate(args), *kwargs.items())
        if isinstance(value, torch.Tensor)
    ]
