"""Runs operators where PyTorch runs them when nobody looks: beneath autograd and all modes.

A replay happens at an arbitrary moment: the program may be inside autocast, `torch.func`, a dispatch mode or
a grad mode that the operator was not first run in. What was recorded lies below all of these, so they are
excluded for the replay. A dispatch mode's handler, on the other hand, is called with too much excluded: the
conjugate and negative bits that a kernel for complex tensors may make anew inside are not resolved where they
would be without a mode, and the results have other bits. Uses PyTorch's internal key guard, as PyTorch's own
modes do. No longer needed once the dispatcher's Python fallback excludes no more than itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from dtrrun.runtime.operators import AUTOCAST, Operator

_C: Any = torch._C
_height = _C._len_torch_dispatch_stack
_pop = _C._pop_torch_dispatch_stack
_push = _C._push_on_torch_dispatch_stack
_set_eval_frame = _C._dynamo.eval_frame.set_eval_frame
_NOTHING = (None,)


def _keys(*names: str) -> Any:
    found = _C.DispatchKeySet(_C.DispatchKey.Undefined)
    for name in names:
        key = getattr(_C.DispatchKey, name, None)
        if key is not None:
            found = found | _C.DispatchKeySet(key)
    return found


_LAZY = _keys("Conjugate", "Negative", "ZeroTensor")
_VIEWS = _keys("ADInplaceOrView")
_SNAPSHOT = _keys("PythonTLSSnapshot")
_OURS = "dtrrun.runtime."
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
)


class below:
    """Context: operators run on plain tensors, seen by no mode, recorded by no autograd graph.

    An interrupt may arrive just as `__exit__` begins, which then does nothing. Where the program could go on
    without its modes after that, enter twice (`with guard, guard:`): the outer exit does what is left to do.
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
        modes: list[Any] = []  # the innermost first
        self._modes = modes
        try:
            # Inference mode would mark fresh tensors; it is a thread's setting, not a dispatch key alone.
            # It begins when it is made, and ends at its exit, or else when it is dropped: too late.
            self._inference = _C._InferenceMode(False)
            self._guard = _C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
            self._guard.__enter__()
            # Kernels ask whether there is any mode, whatever is excluded; and without one, Dynamo, if the
            # program is inside of `torch.compile`, would begin to trace our own code.
            height = _height()
            if height:  # `extend` and `map`: what is taken is noted in one call, with no interrupt in between
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
        """Put everything back that has not been put back yet."""
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


Autocast = tuple[tuple[str, torch.dtype], ...]
"""The types of device that autocast is on for, each with the type that it casts to."""


def program_autocast(operator: Operator) -> Autocast:
    """The autocast state that the operators called by `operator` have without a mode.

    Within a mode's handler, where this is called, autocast is always off. It is also off in the operators
    that autocast casts, and below a mode of the program's.
    """
    with _C._RestorePythonTLSSnapshot():
        found = tuple(
            [
                (device_type, torch.get_autocast_dtype(device_type))
                for device_type in AUTOCAST
                if device_type not in operator.autocasts and torch.is_autocast_enabled(device_type)
            ]
        )
    return found if found and not inside_another_mode() else ()


@contextmanager
def as_without_mode(autocast: Autocast = ()) -> Iterator[None]:
    """For a call in a mode's handler, or a replay: what its kernel calls is handled as without a mode.

    Conjugate and negative bits are resolved, and autocast casts what `autocast` says.
    """
    dtypes = [(device_type, torch.get_autocast_dtype(device_type)) for device_type, _ in autocast]
    try:
        for device_type, dtype in autocast:
            torch.set_autocast_dtype(device_type, dtype)
        with _unhidden(_LAZY | _autocast_keys(autocast)):
            yield
    finally:
        for device_type, dtype in dtypes:
            torch.set_autocast_dtype(device_type, dtype)


@contextmanager
def composite(operator: Operator) -> Iterator[None]:
    """For a composite operator that came whole, as in inference mode: its parts run as without a mode.

    Its views are autograd's, too. The parts take a snapshot of their own, by which `program_autocast` knows
    whether autocast is off within.
    """
    if not torch.is_inference_mode_enabled() or inside_another_mode():
        yield
        return
    keys = _LAZY | _SNAPSHOT | _autocast_keys(program_autocast(operator))
    if not operator.tracks_views:
        keys = keys | _VIEWS
    included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    with _C._RestorePythonTLSSnapshot(), _C._ForceDispatchKeyGuard(included, excluded - keys):
        yield


def only_our_mode() -> bool:
    """Whether ours is the one mode that is on in this thread."""
    if _C._len_torch_dispatch_stack() != 1:
        return False
    return type(_C._get_dispatch_stack_at(0)).__module__.startswith(_OURS)


@contextmanager
def without_our_mode() -> Iterator[None]:
    """Where ours is the only mode, there is none."""
    mode = _C._pop_torch_dispatch_stack(None)
    try:
        yield
    finally:
        _C._push_on_torch_dispatch_stack(mode)


def inside_another_mode() -> bool:
    """Whether a mode or a tensor subclass of the program's has called the operator that is being handled.

    PyTorch runs their handlers with as much excluded as ours, whether we are there or not.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and not frame.f_globals["__name__"].startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _unhidden(keys: Any) -> Any:
    excluded = _C._dispatch_tls_local_exclude_set()
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded - keys)


def _autocast_keys(autocast: Autocast) -> Any:
    return _keys(*[AUTOCAST[device_type] for device_type, _ in autocast])
