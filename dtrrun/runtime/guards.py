"""Runs operators where they first ran: beneath autograd and all modes.

A replay happens at an arbitrary moment: the program may be inside autocast, `torch.func`, a dispatch mode or
a grad mode in which the operator did not first run. Recorded operators lie below all of these, so they are
excluded for the replay. Uses PyTorch's internal key guard, as PyTorch's own modes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dtrrun.extensions.build import KEY

_C: Any = torch._C
_height = _C._len_torch_dispatch_stack
_pop = _C._pop_torch_dispatch_stack
_push = _C._push_on_torch_dispatch_stack
_set_eval_frame = _C._dynamo.eval_frame.set_eval_frame
_NOTHING = (None,)
is_tracing = _C._is_tracing


def _keys(*names: str) -> Any:
    found = _C.DispatchKeySet(_C.DispatchKey.Undefined)
    for name in names:
        with suppress(RuntimeError):  # not in this version
            found = found | _C.DispatchKeySet(_C._dispatch_key_parse(name))
    return found


_TRACER = _keys("Tracer")
_INCLUDED = _keys("BackendSelect")
_EXCLUDED = _keys(
    "Python",
    "PythonTLSSnapshot",
    "PythonDispatcher",
    "ADInplaceOrView",
    "AutocastCPU",
    "AutocastCUDA",
    "AutocastXPU",
    "AutocastMPS",
    "AutogradOther",
    "AutogradCPU",
    "AutogradCUDA",
    "AutogradXPU",
    "AutogradMPS",
    "AutogradMeta",
    "AutogradFunctionality",
    "AutogradNestedTensor",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchBatched",
    "FuncTorchGradWrapper",
    "FuncTorchVmapMode",
    "Functionalize",
    "Fake",
)


_OURS = _keys(KEY)
_OUR_KEY = _OURS.highestPriorityTypeId()

_extension: Any = None


def use_extension(native: Any) -> None:
    """Use this extension from now on, as long as the process lives."""
    global _extension
    _extension = native


def silently(function: Callable[[], Any], *, recorded: bool = True) -> Any:
    """Call a function that runs operators, suppressing their warnings: the program has had these.

    recorded: whether PyTorch's profiler may see them.
    """
    return _extension.silently(function, recorded)


def aside(function: Callable[[], Any]) -> Any:
    """Call a function that runs operators of our own on plain tensors, in the middle of anything.

    Nobody sees these, and nothing is evicted for the memory that they are refused.
    """

    def run() -> Any:
        with (guard := below()), guard, _C.DisableTorchFunction():
            return function()

    return _extension.aside(run)


def without_our_key(keys: Any) -> Any:
    """Return a set of dispatch keys without the one at which operators come to the extension."""
    return keys - _OURS


@contextmanager
def interposed() -> Iterator[None]:
    """Context: this thread's operators are intercepted, even while the interposer handles an operator."""
    excluded = _C._dispatch_tls_is_dispatch_key_excluded(_OUR_KEY)
    _C._dispatch_tls_set_dispatch_key_excluded(_OUR_KEY, False)
    try:
        yield
    finally:
        _C._dispatch_tls_set_dispatch_key_excluded(_OUR_KEY, excluded)


def unseen() -> Any:
    """Context: this thread's operators are not intercepted."""
    return _C._ExcludeDispatchKeyGuard(_OURS)


class below:
    """Context: operators run on plain tensors, hidden from modes and not recorded by autograd.

    An interrupt may arrive just as `__exit__` begins, which then does nothing. If the program could then
    continue without its modes, enter twice (`with guard, guard:`): the outer exit does the rest.
    """

    __slots__ = ("_compiler", "_guard", "_inference", "_modes")

    _modes: list[Any] | None  # None: not entered

    def __init__(self) -> None:
        self._modes = None

    def __enter__(self) -> None:
        if self._modes is not None:
            return
        self._inference: Any = None
        self._guard: Any = None
        self._compiler: list[Any] = []
        modes: list[Any] = []  # innermost first
        self._modes = modes
        try:
            # Inference mode would mark fresh tensors; it is a thread-local setting, not only a dispatch key.
            # This guard acts on construction and must be exited in `__exit__`: its destructor is too late.
            self._inference = _C._InferenceMode(False)
            self._guard = _C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
            self._guard.__enter__()
            # Kernels ask whether there is any mode, whatever is excluded. And with the modes gone, Dynamo
            # would begin to trace our code if the program is inside `torch.compile`.
            height = _height()
            if height:  # `extend` and `map`: one call, with no interrupt in between
                modes.extend(map(_pop, _NOTHING * height))
                self._compiler.extend(map(_set_eval_frame, _NOTHING))
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *exc: Any) -> None:
        try:
            self._leave()
        except BaseException:  # an interrupt
            self._leave()
            raise

    def _leave(self) -> None:
        """Restore everything that has not been restored yet."""
        modes = self._modes
        if modes is None:
            return
        while self._compiler:
            _set_eval_frame(self._compiler[0])
            del self._compiler[0]
        while (height := _height()) < len(modes):
            _push(modes[-1 - height])
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
        self._modes = None


@contextmanager
def untraced() -> Iterator[None]:
    """Context in which `torch.jit.trace` records nothing.

    Tracing also records queries that are not operators, such as those of a tensor's sizes.
    """
    state = _C._get_tracing_state() if is_tracing() else None
    if state is None:
        yield
        return
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


def _set_tracing_state(state: Any) -> None:
    included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    with _C._ForceDispatchKeyGuard(included, excluded - _TRACER):  # PyTorch refuses it beneath the tracer
        _C._set_tracing_state(state)


@contextmanager
def without_session() -> Iterator[None]:
    """Context without any mode, in which the session sees no operator."""
    with _disable_current_modes(), unseen():
        yield
