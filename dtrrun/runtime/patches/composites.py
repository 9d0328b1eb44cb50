"""Replaces kernels of composite operators that access memory without an operator, while a session runs.

Some read an integer tensor by its address (lengths, split points) before any operator runs: it must be
resident. Our kernels are registered with the dispatcher, where C++, TorchScript and Python all reach them,
and nothing that Python sees is replaced. They use autograd's key, for which a composite operator has no
kernel. Where autograd is bypassed, as in inference mode, the native extension calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dtrrun.runtime.access import Reach, unseen
from dtrrun.runtime.guards import without_session
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
"""These read an integer tensor's memory. Their other tensors they only pass to operators."""

READ_WITHOUT_GRADIENT = ("max_pool1d",)
"""These read their tensors' memory directly when there is no gradient to compute, on a CPU."""

UNSEEN = (
    "_sobol_engine_draw",
    "_sobol_engine_ff_",
    "_sobol_engine_initialize_state_",
    "_sobol_engine_scramble_",
)
"""These access the memory of all their arguments, and of their own intermediates."""

Kernel = Callable[..., Any]
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Composites:
    """The kernels of one session. `reach` is called before each access."""

    def __init__(self, reach: Reach, kernels: dict[Any, Kernel], devices: Sequence[str]) -> None:
        """kernels: filled with the kernels, by operator.

        devices: dispatch keys of the devices of the operators' tensors.
        """
        self._reach = reach
        self._devices = devices
        self._kernels = kernels

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for func in _named(READ_INTEGERS):
            self._register(func, self._reading(func))
        for func in _named(READ_WITHOUT_GRADIENT):
            self._register(func, self._reading_without_gradient(func))
        for func in _named(UNSEEN):
            self._register(func, self._unseen(func))

    def remove(self) -> None:
        self._library._destroy()
        self._kernels.clear()

    def _register(self, func: Any, kernel: Kernel) -> None:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return  # not in this version of PyTorch
        self._kernels[func] = kernel = hiding(kernel)
        for device in self._devices:
            self._library.impl(func, kernel, f"Autograd{device}")

    def _reading(self, func: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with unseen():
                touched = [one for one in _touched(args, kwargs, set()) if not one[0].is_floating_point()]
            return self._run(func, args, kwargs, touched, nullcontext)

        return kernel

    def _reading_without_gradient(self, func: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            touched = _touched(args, kwargs, set())
            return self._run(func, args, kwargs, [] if _has_gradient(touched) else touched, nullcontext)

        return kernel

    def _unseen(self, func: Any) -> Kernel:
        is_written = _writes(func)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            touched = _touched(args, kwargs, is_written)
            return self._run(func, args, kwargs, touched, without_session)

        return kernel

    def _run(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        touched: list[tuple[torch.Tensor, bool]],
        around: Callable[[], Any],
    ) -> Any:
        """Call the composite itself, with the memory that it accesses (and may write to) resident."""
        ends: list[Callable[[], None]] = []
        try:
            for tensor, writes in touched:
                ends.append(self._reach(tensor, writes, False))
            # The program's function modes have already seen this call of the operator.
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
    """Yield the overloads that this version of PyTorch has."""
    for name in names:
        packet, _, overload = name.partition(".")
        yield from (func for func in _overloads(packet) if func._overloadname == (overload or "default"))


def _writes(func: Any) -> set[int | str]:
    """Return the positions and names of the arguments that an operator writes to."""
    written: set[int | str] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    return written


def _touched(args: Any, kwargs: dict[str, Any], written: set[int | str]) -> list[tuple[torch.Tensor, bool]]:
    """Return the tensors among the arguments, and whether each is written to."""
    return [
        (value, place in written)
        for place, value in (*enumerate(args), *kwargs.items())
        if isinstance(value, torch.Tensor)
    ]


def _has_gradient(touched: list[tuple[torch.Tensor, bool]]) -> bool:
    """Return whether autograd records what is done to these tensors."""
    with unseen():
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in touched)
