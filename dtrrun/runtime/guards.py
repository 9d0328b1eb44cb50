"""Runs operators underneath everything that the program has switched on.

A replay happens at an arbitrary moment: the program may be inside autocast, `torch.func`, a dispatch mode or
a grad mode that the operator was not first run in. What was recorded lies below all of these, so they are
excluded for the replay. Uses PyTorch's internal key guard, as PyTorch's own modes do.
"""

from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C
_KEYS = _C.DispatchKeySet(_C.DispatchKey.Python)
for _name in (
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
):
    _key = getattr(_C.DispatchKey, _name, None)
    if _key is not None:
        _KEYS = _KEYS | _C.DispatchKeySet(_key)


class below:
    """Context: operators run on plain tensors, seen by no mode, recorded by no autograd graph."""

    __slots__ = ("_guard", "_inference")

    def __enter__(self) -> None:
        # Inference mode would mark fresh tensors; it is a thread's setting, not a dispatch key alone.
        self._inference = _C._InferenceMode(False)
        self._inference.__enter__()
        self._guard = _C._ExcludeDispatchKeyGuard(_KEYS)
        self._guard.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._guard.__exit__(None, None, None)
        self._inference.__exit__(None, None, None)
