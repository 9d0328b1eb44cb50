"""Replaces kernels of composite operators that write to memory without an operator, while a session runs.

Those that only read by address, before any operator runs (lengths, split points), do so on a CPU, where the
memory is brought back when they touch it (`native/faults.h`). Our kernels are registered with the dispatcher,
where C++, TorchScript and Python all reach them, and nothing that Python sees is replaced. They use
autograd's key, for which a composite operator has no kernel. Where autograd is bypassed, as in inference
mode, the native extension calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dtrrun.runtime.access import Reach, unseen
from dtrrun.runtime.guards import without_session
from dtrrun.runtime.tracebacks import hiding

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
        for func in _overloads(UNSEEN):
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

    def _unseen(self, func: Any) -> Kernel:
        is_written = _writes(func)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            """Call the composite itself, with the memory that it accesses resident."""
            ends: list[Callable[[], None]] = []
            try:
                for place, value in (*enumerate(args), *kwargs.items()):
                    if isinstance(value, torch.Tensor):
                        ends.append(self._reach(value, place in is_written, False))
                # The program's function modes have already seen this call of the operator.
                with unseen(), without_session():
                    return func._op_dk(COMPOSITE, *args, **kwargs)
            finally:
                for end in ends:
                    end()

        return kernel


def _overloads(names: tuple[str, ...]) -> Iterator[Any]:
    """Yield the operators of these names that this version of PyTorch has."""
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            yield from (getattr(packet, overload) for overload in packet.overloads())


def _writes(func: Any) -> set[int | str]:
    """Return the positions and names of the arguments that an operator writes to."""
    written: set[int | str] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    return written
