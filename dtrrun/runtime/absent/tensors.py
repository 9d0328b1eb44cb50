"""Tensors on a GPU that is absent: a dispatch mode that makes PyTorch's FakeTensors of them.

Operators without such a tensor run as always, so a program loads its data and makes its model for real.
Whatever reads a number from the GPU gets one that was not computed: that of the last fill, or else 1 for
floats and 0 for others. If sizes depend on values (`nonzero`, masks), all elements count as chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dtrrun.runtime.absent.recorder import Recorder
from dtrrun.runtime.dispatch.arguments import outputs_of
from dtrrun.runtime.operators import operator_of

aten: Any = torch.ops.aten
DEVICE = torch.ops.prim.device.default
PINS = {aten._pin_memory.default, aten.pin_memory.default}
FILLS = {aten.fill_.Scalar: 1, aten.full.default: 1, aten.full_like.default: 1}
"""Operators that fill a tensor, and the position of the value."""
ZEROS = {aten.zero_.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
ONES = {aten.ones.default, aten.ones_like.default, aten.new_ones.default}
COPIES = {aten._to_copy.default, aten.clone.default}
TESTS = {aten.all.default: 1.0, aten.all.dim: 1.0, aten.any.default: 0.0, aten.any.dim: 0.0}
"""What they tell of a tensor whose values are not known: that all numbers are finite, and none is odd."""
KEEPS = {aten._amp_foreach_non_finite_check_and_unscale_.default}
"""They write to a tensor what it has, where all numbers are finite."""
UNKNOWN = "dtrrun estimate: {} does not work without its GPU: its result depends on values, or is unknown"
ASSUMED = "{} counts as if it chose all elements: how many it chooses depends on values"


class CannotTell(RuntimeError):
    """What the program does next depends on what a GPU would compute."""


class Shapes(FakeTensorMode):
    """Computes shapes. The GPU that Python is told of must not be used."""

    avoid_device_init = True


class Tensors(TorchDispatchMode):
    """Makes tensors on the GPU, and runs operators with them without computing anything."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._fake = Shapes(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and importing the compiler takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        device = kwargs.get("device")
        there = device is not None and torch.device(device).type == "cuda"
        if not there and not any(issubclass(one, FakeTensor) for one in types):
            return args[0].clone() if func in PINS else func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and here(args[0]):
            return self._number(args[0])
        if func is aten._to_copy.default and there and not here(args[0]):
            return self._arrive(args[0], kwargs)
        if func is aten.equal.default:
            return True
        value = self._fill(func, args)
        kept = [self._recorder.value_of(one) for one in args[1:2] if here(one)] if func in KEEPS else []
        result = self._run(func, args, kwargs)
        self._recorder.ran(func, args, kwargs, result, here)
        if value is not None:
            for one in outputs_of(result, [])[:1]:
                self._recorder.fill(one, value)
        for was in kept:
            if was is not None:
                self._recorder.fill(args[1], was)
        return self._returned(func, args, result)

    def swap(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Replaces `torch.utils.swap_tensors`, which refuses tensors that anything has weak references to."""
        self._fake.fake_tensor_converter.tensor_memo.clear()
        _swap(one, other)  # type: ignore[no-untyped-call]

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            with self._fake:
                return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._assume(func, args, kwargs)
        except (NotImplementedError, UnsupportedOperatorException):
            # Without a kernel for shapes. What only writes to its arguments needs none.
            if all(one.alias_info is not None for one in func._schema.returns):
                return _written(func, args)
            raise CannotTell(UNKNOWN.format(operator_of(func).name)) from None

    def _assume(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the largest result, where its size depends on values."""
        self._recorder.note(ASSUMED.format(operator_of(func).name))
        first = args[0]
        with self._fake:
            if func is aten.nonzero.default:
                return _numbers(first, first.numel(), max(first.dim(), 1) if first.dim() else 0)
            if func is aten.masked_select.default:
                shape = torch.broadcast_shapes(first.shape, args[1].shape)
                return first.new_empty((shape.numel(),))
            if func is aten.index.Tensor:
                return func(first, [*_indices(args[1])])
            if func is aten._unique2.default:
                count = first.numel()
                return first.new_empty((count,)), _numbers(first, count), _numbers(first, count)
            if func is aten.bincount.default:
                return _numbers(first, max(args[2] if len(args) > 2 else kwargs.get("minlength", 0), 1))
        raise CannotTell(UNKNOWN.format(operator_of(func).name))

    def _arrive(self, source: torch.Tensor, kwargs: Any) -> torch.Tensor:
        """Return a tensor on the GPU in place of one on the CPU. The latter is not seen by FakeTensor, which
        would keep weak references to it: modules could not swap their parameters then."""
        dtype = kwargs.get("dtype") or source.dtype
        with self._fake:
            if is_non_overlapping_and_dense_or_false(source):
                made = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="cuda")
            else:
                made = torch.empty(source.shape, dtype=dtype, device="cuda")
        self._recorder.arrives(made)
        if source.numel() == 1:
            self._recorder.fill(made, source.reshape(()).item())
        return made

    def _number(self, tensor: torch.Tensor) -> Any:
        value = self._recorder.value_of(tensor)
        if value is None:
            value = 1.0 if tensor.dtype.is_floating_point else 0
        return value

    def _fill(self, func: Any, args: Any) -> float | None:
        if func in ZEROS:
            return 0.0
        if func in ONES:
            return 1.0
        if func in COPIES:
            return self._recorder.value_of(args[0])
        if func in TESTS:
            value = self._recorder.value_of(args[0])
            return TESTS[func] if value is None else float(bool(value))
        if func in FILLS and len(args) > FILLS[func] and isinstance(args[FILLS[func]], (int, float)):
            return float(args[FILLS[func]])
        return None

    def _returned(self, func: Any, args: Any, result: Any) -> Any:
        """Return what the program gets: tensors on the CPU are real."""
        if isinstance(result, FakeTensor):
            if here(result):
                return result
            if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.returns):
                return args[0]
            value = self._number(args[0]) if args and isinstance(args[0], FakeTensor) else 0
            return torch.full(result.shape, value, dtype=result.dtype)
        if isinstance(result, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in result):
            return type(result)(self._returned(func, args, one) for one in result)
        return result


_swap = torch.utils.swap_tensors


def here(tensor: Any) -> bool:
    """Return whether a tensor is on the GPU that is absent."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _written(func: Any, args: Any) -> Any:
    """Return what an operator returns that only writes to its arguments."""
    if not func._schema.returns:
        return None
    places = [place for place in operator_of(func).mutates if isinstance(place, int)]
    found = [args[place] for place in places]
    return found[0] if len(func._schema.returns) == 1 else tuple(found)


def _numbers(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.int64)


def _indices(indices: Any) -> Any:
    """Yield indices with numbers in place of masks, of which all elements are chosen."""
    for one in indices:
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            for _ in range(one.dim()):
                yield _numbers(one, one.numel())
        else:
            yield one
