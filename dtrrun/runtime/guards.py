"""Runs operators where PyTorch runs them when nobody looks: beneath autograd and all modes.

A replay happens at an arbitrary moment: the program may be inside autocast, `torch.func`, a dispatch mode or
a grad mode that the operator was not first run in. What was recorded lies below all of these, so they are
excluded for the replay. A dispatch mode's handler, on the other hand, is called with too much excluded: the
conjugate and negative bits that a kernel for complex tensors may make anew inside are not resolved where they
would be without a mode, and the results have other bits. Uses PyTorch's internal key guard, as PyTorch's own
modes do. No longer needed once the dispatcher's Python fallback excludes no more than itself.
"""

from __future__ import annotations

from typing import Any

import torch

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
        # Inference mode would mark fresh tensors; it is a thread's setting, not a dispatch key alone.
        self._inference = _C._InferenceMode(False)
        self._guard = _C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
        self._compiler: list[Any] = []
        modes: list[Any] = []  # the innermost first
        self._modes = modes
        try:
            self._inference.__enter__()
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
        self._guard.__exit__(None, None, None)
        self._inference.__exit__(None, None, None)
        self._modes = None


def lazy_bits() -> Any:
    """Context for a call in a mode's handler: conjugate and negative bits are resolved as without a mode."""
    return _without(_LAZY)


def views() -> Any:
    """The same for a composite that inference mode has handed over whole: its views are autograd's, too."""
    return _without(_LAZY | _VIEWS)


def _without(keys: Any) -> Any:
    excluded = _C._dispatch_tls_local_exclude_set()
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded - keys)
