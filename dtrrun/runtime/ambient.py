"""Settings that a kernel reads besides its arguments.

A replay runs an operator later than its first run, perhaps in another thread. Meanwhile the program may have
changed the default dtype, the number of threads or a backend's flags, and the same operator on the same
inputs would give different bits, or a result of another dtype. So every recipe keeps the settings that its
operator saw, and a replay restores those that differ.

The settings of `GENERAL` are read for every operator of the program, so they are few and cheap to read (a
quarter of a microsecond in all). Settings that only some kernels use are read for those alone: see
`family_of`. Seeds and states of random generators are in `rng`; autocast is in `guards`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_C: Any = torch._C

State = tuple[Any, ...]
"""The values of one family's settings, in the order of `_settings_of`."""
Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""The getter and setter of a setting."""

GENERAL, MATMUL, CONVOLUTION = "general", "matmul", "convolution"
RECURRENT, LINALG, ANY = "recurrent", "linalg", "any"
"""Families of operators, by the settings that their kernels read."""

_MATMULS = {
    *("mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "addr", "mv", "dot", "vdot"),
    *("_addmm_activation", "_int_mm", "_trilinear", "_euclidean_dist", "_cdist_forward", "_cdist_backward"),
}

_DENORMAL = 4e-320  # half of it is 0 if the processor flushes denormal numbers

is_grad_enabled = torch.is_grad_enabled
get_default_dtype = torch.get_default_dtype
get_num_threads = torch.get_num_threads
_get_mkldnn = _C._get_mkldnn_enabled
_get_deterministic = _C._get_deterministic_algorithms
_get_warn_only = _C._get_deterministic_algorithms_warn_only


def family_of(namespace: str, name: str) -> str:
    """Return the family of an operator.

    name: without its namespace and overload. Foreign ones may read anything.
    """
    if namespace != "aten":
        return ANY
    if name in _MATMULS or "linear" in name or "_dot_product_" in name:
        return MATMUL
    if "conv" in name:
        return CONVOLUTION
    if "rnn" in name or "lstm" in name or "gru" in name:
        return RECURRENT
    return LINALG if "linalg" in name else GENERAL


def general() -> State:
    """Return the settings that any kernel may read, in the order of `_GENERAL`."""
    return (
        is_grad_enabled(),
        get_default_dtype(),
        _get_mkldnn(),
        _get_deterministic(),
        _get_warn_only(),  # if not, some kernels raise
        get_num_threads(),
        _DENORMAL * 0.5 == 0.0,  # a setting of the thread's processor
    )


DEFAULT_DTYPE = 1
"""Index of the default dtype in each state."""


def _set_deterministic(mode: bool) -> None:
    _C._set_deterministic_algorithms(mode, warn_only=_get_warn_only())


def _set_warn_only(warn_only: bool) -> None:
    _C._set_deterministic_algorithms(_get_deterministic(), warn_only=warn_only)


_GENERAL: tuple[Callable[[Any], Any], ...] = (
    _C._set_grad_enabled,
    torch.set_default_dtype,
    _C._set_mkldnn_enabled,
    _set_deterministic,
    _set_warn_only,
    torch.set_num_threads,
    torch.set_flush_denormal,
)


def _flag(name: str) -> list[Setting]:
    """Return a setting of `torch._C`, if this version of PyTorch has it."""
    read, write = getattr(_C, f"_get_{name}", None), getattr(_C, f"_set_{name}", None)
    return [(read, write)] if read is not None and write is not None else []


def _precision(backend: str, operation: str) -> list[Setting]:
    """Return the float32 precision of an operation of a backend (before PyTorch 2.9 there is one for all)."""
    read = getattr(_C, "_get_fp32_precision_getter", None)
    if read is None:
        return _flag("float32_matmul_precision") if operation == "matmul" else []
    write = _C._set_fp32_precision_setter

    def set_precision(value: str) -> None:
        # The value read may be inherited from the backend; then it must be inherited again.
        write(backend, operation, "none" if value == read(backend, "all") else value)

    return [(lambda: read(backend, operation), set_precision)]


def _settings_of(family: str, device_type: str) -> list[Setting]:
    """Return the settings that a family's kernels read besides the general ones."""
    cuda = device_type == "cuda"
    backend = "cuda" if cuda else "mkldnn"
    cudnn = (
        [*_flag("cudnn_enabled"), *_flag("cudnn_deterministic"), *_flag("cudnn_benchmark")] if cuda else []
    )
    if family == GENERAL:
        return []
    if family == MATMUL:
        half = (
            "cublas_allow_fp16_reduced_precision_reduction",
            "cublas_allow_bf16_reduced_precision_reduction",
        )
        names = half if cuda else ("cpu_allow_fp16_reduced_precision_reduction",)
        return [*_precision(backend, "matmul"), *[setting for name in names for setting in _flag(name)]]
    if family == CONVOLUTION:
        other = cudnn if cuda else [*_flag("mkldnn_deterministic"), *_flag("nnpack_enabled")]
        return [*_precision(backend, "conv"), *other]
    if family == RECURRENT:
        return [*_precision(backend, "rnn"), *cudnn]
    if family == LINALG:
        return _flag("linalg_preferred_backend") if cuda else []
    parts = (MATMUL, CONVOLUTION, RECURRENT, LINALG)
    return [setting for part in parts for setting in _settings_of(part, device_type)]


class Ambient:
    """The settings for one type of device.

    `readers`: by family, a function that returns the present `State`.
    """

    def __init__(self, device_type: str) -> None:
        self.readers: dict[str, Callable[[], State]] = {}
        self._writers: dict[str, tuple[Callable[[Any], Any], ...]] = {}
        for family in (GENERAL, MATMUL, CONVOLUTION, RECURRENT, LINALG, ANY):
            settings = _settings_of(family, device_type)
            self.readers[family] = _reader([read for read, _ in settings])
            self._writers[family] = (*_GENERAL, *[write for _, write in settings])

    @contextmanager
    def restored(self, family: str, state: State) -> Iterator[None]:
        """Context in which the settings are those of `state`."""
        before = self.readers[family]()
        if before == state:
            yield
            return
        changed = [
            (write, old)
            for write, old, new in zip(self._writers[family], before, state, strict=True)
            if old != new
        ]
        try:
            for write, old, new in zip(self._writers[family], before, state, strict=True):
                if old != new:
                    write(new)
            yield
        finally:
            for write, old in changed:
                write(old)


def _reader(reads: list[Callable[[], Any]]) -> Callable[[], State]:
    if not reads:
        return general
    if len(reads) == 1:
        (only,) = reads
        return lambda: (*general(), only())
    return lambda: (*general(), *[read() for read in reads])
