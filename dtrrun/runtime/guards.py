"""Runs operators where PyTorch runs them without a mode: beneath autograd and all modes.

A replay happens at an arbitrary moment: the program may be inside autocast, `torch.func`, a dispatch mode or
a grad mode in which the operator did not first run. Recorded operators lie below all of these, so they are
excluded for the replay. In a dispatch mode's handler, on the other hand, too much is excluded: conjugate and
negative bits that a kernel for complex tensors creates inside are not resolved as they would be without a
mode, and the results have different bits. Uses PyTorch's internal key guard, as PyTorch's own modes do. No
longer needed once the dispatcher's Python fallback excludes only itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dtrrun.runtime.operators import AUTOCAST, Operator

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


_LAZY = _keys("Conjugate", "Negative", "ZeroTensor")
_VIEWS = _keys("ADInplaceOrView")
_SNAPSHOT = _keys("PythonTLSSnapshot")
_TRACER = _keys("Tracer")
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
    "Fake",
)


class _WayIn:
    """The dispatch key at which operators come to the extension."""

    key: Any = None
    keys = _keys()  # it alone, or none


def use_key(name: str) -> None:
    """Operators come to the extension at this dispatch key, for as long as the process lives."""
    _WayIn.key, _WayIn.keys = _C._dispatch_key_parse(name), _keys(name)


def without_our_key(keys: Any) -> Any:
    """Return a set of dispatch keys without that at which operators come to the extension."""
    return keys - _WayIn.keys


@contextmanager
def interposed() -> Iterator[None]:
    """Context, while the interposer handles an operator: those of this thread come to it nonetheless."""
    key = _WayIn.key
    excluded = _C._dispatch_tls_is_dispatch_key_excluded(key)
    _C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        _C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def unseen() -> Any:
    """Context: what this thread does comes to no interposer."""
    return _C._ExcludeDispatchKeyGuard(_WayIn.keys)


class below:
    """Context: operators run on plain tensors, hidden from modes and not recorded by autograd.

    An interrupt may arrive just as `__exit__` begins, which then does nothing. If the program could continue
    without its modes after that, enter twice (`with guard, guard:`): the outer exit does the rest.
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
            # Inference mode would mark fresh tensors; it is a setting of the thread, not only a dispatch key.
            # It begins on construction and must be ended at the exit: when it is dropped is too late.
            self._inference = _C._InferenceMode(False)
            self._guard = _C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
            self._guard.__enter__()
            # Kernels ask whether there is any mode, whatever is excluded. And without one, Dynamo would begin
            # to trace our code if the program is inside `torch.compile`.
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


Autocast = tuple[tuple[str, torch.dtype], ...]
"""The device types for which autocast is on, each with the dtype that it casts to."""


def program_autocast(operator: Operator, native: Any = None) -> Autocast:
    """Return the autocast state that operators called by `operator` have without a mode.

    native: the extension, if it has brought the operator; it knows. Within a mode's handler, where this is
    called, autocast is always off. It is also off in the operators that autocast casts (`autocast_as_here`),
    and below a mode of the program.
    """
    if native is not None:
        return tuple(
            [
                (device_type, torch.get_autocast_dtype(device_type))
                for device_type, key in AUTOCAST.items()
                if not native.was_excluded(key)
            ]
        )
    off = getattr(_cast, "off", ())
    with _C._RestorePythonTLSSnapshot():
        found = tuple(
            [
                (device_type, torch.get_autocast_dtype(device_type))
                for device_type in AUTOCAST
                if device_type not in operator.autocasts
                and device_type not in off
                and torch.is_autocast_enabled(device_type)
            ]
        )
    return found if found and not inside_another_mode() else ()


_cast = threading.local()
"""`off`: device types for which autocast is off in this thread's current composite."""


@contextmanager
def autocast_as_here() -> Iterator[None]:
    """For a composite that autocast may have cast: operators that it calls have the present autocast state.

    In the mode's handler only the state at the program's own call is known.
    """
    before = getattr(_cast, "off", ())
    _cast.off = tuple([kind for kind in AUTOCAST if not torch.is_autocast_enabled(kind)])
    try:
        yield
    finally:
        _cast.off = before


@contextmanager
def as_without_mode(autocast: Autocast = (), *, views: bool = False) -> Iterator[None]:
    """For a call in a mode's handler, or a replay: operators called by its kernel run as without a mode.

    Conjugate and negative bits are resolved, and autocast casts according to `autocast`. views: in inference
    mode autograd tracks the views that the kernel makes; otherwise it does so above the handler.
    """
    keys = _LAZY | _autocast_keys(autocast)
    if views and torch.is_inference_mode_enabled():
        keys = keys | _VIEWS
    dtypes = [(device_type, torch.get_autocast_dtype(device_type)) for device_type, _ in autocast]
    try:
        for device_type, dtype in autocast:
            torch.set_autocast_dtype(device_type, dtype)
        with _unhidden(keys):
            yield
    finally:
        for device_type, dtype in dtypes:
            torch.set_autocast_dtype(device_type, dtype)


@contextmanager
def composite(operator: Operator) -> Iterator[None]:
    """For a composite operator that arrived whole, as in inference mode: its parts run as without a mode.

    Autograd tracks its views. The parts take their own snapshot, from which `program_autocast` knows whether
    autocast is off inside.
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
    """Return whether our mode is the only one in this thread."""
    if _C._len_torch_dispatch_stack() != 1:
        return False
    return type(_C._get_dispatch_stack_at(0)).__module__.startswith(_OURS)


@contextmanager
def untraced() -> Iterator[None]:
    """Context in which `torch.jit.trace` records nothing.

    It also records what is asked of a tensor without an operator, such as its sizes.
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
def without_our_mode() -> Iterator[None]:
    """Context without any mode, if ours is the only one."""
    mode = _C._pop_torch_dispatch_stack(None)
    try:
        yield
    finally:
        _C._push_on_torch_dispatch_stack(mode)


@contextmanager
def without_session() -> Iterator[None]:
    """Context without any mode, in which the session sees no operator."""
    with _disable_current_modes(), unseen():
        yield


def any_like_a_subclass(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether `isTensorSubclassLike` holds even without a mode: for subclasses and `torch.func`."""
    ordinary = torch.Tensor.__torch_dispatch__
    return any(
        type(tensor).__torch_dispatch__ not in (ordinary, _C._disabled_torch_dispatch_impl)
        or _C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def inside_another_mode() -> bool:
    """Return whether a mode or tensor subclass of the program has called the current operator.

    PyTorch runs their handlers with as much excluded as ours, with or without us.
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
