"""How much memory common operators allocate, from the sizes of their inputs alone.

PyTorch's shape functions know every operator, but take as long as a small kernel: too long for programs whose
shapes hardly repeat. The formulas here give the number of elements of each result. Element sizes are learned:
the shape function is called once for every family of calls, which is an operator with inputs of the same
dtypes. Its answer also confirms that the formula holds for the family. Unusual calls have no formula and no
family, and the shape function is called every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from operator import mul
from typing import Any

import torch

from dtrrun.core.graph import TENSOR_SLOT, Geometry
from dtrrun.runtime.dispatch.arguments import KINDS, VALUE
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.storage import storage_of

aten = torch.ops.aten

MANY = 1 << 56  # elements, which no memory holds: the operator will raise an error
FAMILIES_LIMIT = 10_000  # programs with endless new types: start over rather than grow forever

Formula = Callable[[list[Any], list[torch.Size]], tuple[int, ...]]
"""Maps the template and the sizes of all tensors to the number of elements of each new storage.

Raises ValueError, IndexError, TypeError or OverflowError for unsupported arguments.
"""

# For arguments whose type, but not value, can affect the dtype of a result.
_NUMBERS = frozenset({int, float, complex})

# One dense result of the broadcast size of the inputs. Operators tagged as pointwise need no entry.
_ELEMENTWISE = {
    "aten::_to_copy",
    "aten::empty_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::_softmax",
    "aten::_log_softmax",
    "aten::_softmax_backward_data",
    "aten::_log_softmax_backward_data",
}


def _elementwise(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    largest = max(sizes, key=len)
    for size in sizes:
        if size and size != largest:
            break
    else:
        return (largest.numel(),)
    broadcast = [1] * len(largest)
    for size in sizes:
        for place in range(-len(size), 0):
            if size[place] != 1:
                if broadcast[place] not in (1, size[place]):
                    raise ValueError("not broadcastable")
                broadcast[place] = size[place]
    return (prod(broadcast),)


def _mm(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    (rows, inner), (same, columns) = sizes[-2:]  # addmm has a bias first
    if inner != same:
        raise ValueError("sizes do not match")
    return (rows * columns,)


def _bmm(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    (batch, rows, inner), (as_many, same, columns) = sizes[-2:]
    if batch != as_many or inner != same:
        raise ValueError("sizes do not match")
    return (batch * rows * columns,)


def _all(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return (sum([size.numel() for size in sizes]),)


def _given(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return (prod(args[1]),)


def _shaped(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return (prod(args[0]),)


def _counted(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return (len(range(*args)),)  # TypeError unless all are whole numbers


def _second(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return (sizes[1].numel(),)


def _reduced(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    left = list(sizes[0])
    if not args[1]:
        raise ValueError("no dimensions: some operators take it for all of them")
    for dim in args[1]:
        left[dim] = 1
    return (prod(left),)


def _one(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return (1,)


def _nothing(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return ()


def _embedding(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    (_, width), indices = sizes
    return (indices.numel() * width,)


def _embedding_backward(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return (args[2] * sizes[0][-1],)


def _batch_norm(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    if args[5] is not True:
        raise ValueError("not training: the shape function makes statistics, the kernel none")
    channels = sizes[0][1]
    return (sizes[0].numel(), channels, channels)


def _batch_norm_backward(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    if not args[9][0]:
        raise ValueError("the shape function makes the gradient of the input all the same")
    channels = sizes[1][1]
    return (sizes[1].numel(), *[channels for wanted in args[9][1:] if wanted])


def _layer_norm(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    rows = prod(sizes[0][: len(sizes[0]) - len(args[1])])
    return (sizes[0].numel(), rows, rows)


def _layer_norm_backward(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    columns = prod(args[2])
    return _wanted(args[7], sizes[1].numel(), columns, columns)


def _group_norm(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    groups = args[3] * args[6]
    return (sizes[0].numel(), groups, groups)


def _group_norm_backward(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return _wanted(args[9], sizes[1].numel(), args[6], args[6])


def _convolution(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    (batch, _, *image), (filters, columns, *kernel) = sizes[:2]
    stride, padding, dilation, transposed, more, groups = args[3:9]
    if not image or any(len(one) != len(image) for one in (kernel, stride, padding, dilation, more)):
        raise ValueError("not a batch, or one number for all dimensions")
    if len(image) > 2 and any(more):
        raise ValueError("the result is a part of what the kernel allocates")
    if transposed:
        made = [
            (n - 1) * s - 2 * p + d * (k - 1) + m + 1
            for n, k, s, p, d, m in zip(image, kernel, stride, padding, dilation, more, strict=True)
        ]
        return (_positive(batch, columns * groups, *made),)
    made = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(image, kernel, stride, padding, dilation, strict=True)
    ]
    return (_positive(batch, filters, *made),)


def _convolution_backward(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    return _wanted(args[10], sizes[1].numel(), sizes[2].numel(), prod(args[3] or (0,)))


def _max_pool(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    kernel, stride, padding, dilation, ceil = args[1:] + [[], [0, 0], [1, 1], False][len(args) - 2 :]
    numel = _pooled(sizes[0], kernel, stride or kernel, padding, dilation, ceil)
    return (numel, numel)


def _avg_pool(args: list[Any], sizes: list[torch.Size]) -> tuple[int, ...]:
    kernel, stride, padding, ceil = args[1:5] + [[], [0, 0], False][len(args) - 2 :]
    return (_pooled(sizes[0], kernel, stride or kernel, padding, [1, 1], ceil),)


def _pooled(
    size: torch.Size,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> int:
    made = []
    for n, k, s, p, d in zip(size[-2:], kernel, stride, padding, dilation, strict=True):
        windows = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil else 0)) // s + 1
        if ceil and (windows - 1) * s >= n + p:  # none begins in the padding behind
            windows -= 1
        made.append(windows)
    return _positive(*size[:-2], *made)


def _positive(*size: int) -> int:
    if min(size) < 1:
        raise ValueError("empty, or the operator will raise an error")
    return prod(size)


def _wanted(mask: Sequence[bool], *numels: int) -> tuple[int, ...]:
    return tuple(numel for wanted, numel in zip(mask, numels, strict=True) if wanted)


_TABLE: dict[Any, Formula] = {
    aten.mm.default: _mm,
    aten.addmm.default: _mm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _bmm,
    aten.cat.default: _all,
    aten.stack.default: _all,
    aten.slice_backward.default: _given,
    aten.select_backward.default: _given,
    aten.sum.default: _one,
    aten.mean.default: _one,
    aten.sum.dim_IntList: _reduced,
    aten.mean.dim: _reduced,
    aten.unsafe_split.Tensor: _nothing,  # views, although not according to the schema
    aten.unsafe_split_with_sizes.default: _nothing,
    aten._unsafe_view.default: _nothing,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _second,
    aten.avg_pool2d.default: _avg_pool,
    aten.avg_pool2d_backward.default: _second,
    aten.empty.memory_format: _shaped,
    aten.zeros.default: _shaped,
    aten.ones.default: _shaped,
    aten.full.default: _shaped,
    aten.rand.default: _shaped,
    aten.randn.default: _shaped,
    aten.arange.default: _counted,
    aten.arange.start: _counted,
    aten.arange.start_step: _counted,
}

_formulas: dict[Any, Formula | None] = {}  # of each operator seen so far
_families: dict[tuple[Any, ...], tuple[int, ...]] = {}  # element sizes of the new storages, in bytes


def new_storages(
    func: Any, operator: Operator, template: list[Any], kwargs: dict[str, Any], geometries: list[Geometry]
) -> list[int] | None:
    """Return the bytes of each storage that a call will allocate; None if the shape function is needed."""
    try:
        formula = _formulas[func]
    except KeyError:
        formula = _formulas[func] = _formula_of(func, operator)
    if formula is None:
        return None
    try:
        itemsizes = _families.get(_family(func, template, kwargs, geometries))
        if itemsizes is None:
            return None
        numels = formula(template, [geometry[0] for geometry in geometries])
        if not all(0 <= numel < MANY for numel in numels):
            return None
        return list(map(mul, numels, itemsizes))
    except (ValueError, IndexError, TypeError, OverflowError):
        return None


def name_of(func: Any, operator: Operator) -> str | None:
    """Return the name of an operator's formula, for the native fast path; None if it has none."""
    if not operator.grows and not operator.makes_tensors:
        return "nothing"
    formula = _formula_of(func, operator)
    return formula and formula.__name__.removeprefix("_")


def learn(
    func: Any,
    template: list[Any],
    kwargs: dict[str, Any],
    geometries: list[Geometry],
    made: list[torch.Tensor],
) -> None:
    """Learn from the result of the shape function: `made` are the tensors over new storages."""
    formula = _formulas.get(func)
    if formula is None:
        return
    try:
        family = _family(func, template, kwargs, geometries)
        numels = formula(template, [geometry[0] for geometry in geometries])
    except (ValueError, IndexError, TypeError, OverflowError):
        return
    if 0 in numels:
        return  # would match any dtype
    itemsizes = tuple(tensor.itemsize for tensor in made)
    nbytes = [storage_of(tensor).nbytes() for tensor in made]
    if len(numels) != len(made) or nbytes != list(map(mul, numels, itemsizes)):
        _formulas[func] = None  # the formula does not fit this operator
        return
    if len(_families) >= FAMILIES_LIMIT:
        _families.clear()
    _families[family] = itemsizes


def _formula_of(func: Any, operator: Operator) -> Formula | None:
    if (
        operator.mutates
        or operator.view
        or operator.composite  # may return an input unchanged
        or operator.reduces
        or operator.opaque_output >= 0
    ):
        return None
    schema = func._schema
    if schema.name in _ELEMENTWISE and func._overloadname == "default":
        return _elementwise
    if (
        torch.Tag.pointwise in func.tags
        and func.namespace == "aten"  # tags of other operators are not reliable
        and [str(result.type) for result in schema.returns] == ["Tensor"]
    ):
        return _elementwise
    return _TABLE.get(func)


def _family(
    func: Any, template: list[Any], kwargs: dict[str, Any], geometries: list[Geometry]
) -> tuple[Any, ...]:
    """Return everything that determines the dtypes of a call's results; ValueError for other kinds of
    arguments."""
    key: list[Any] = [func, torch.get_default_dtype()]
    feed = iter(geometries)
    for arg in template:
        key.append(_kind(arg, feed))
    for name, arg in kwargs.items():
        key.append(name)
        key.append(_kind(arg, feed))
    return tuple(key)


def _kind(arg: Any, feed: Iterator[Geometry]) -> Any:
    if arg is TENSOR_SLOT:
        # A tensor without plain storage has no geometry; one with lazy bits has a longer one.
        size, _, _, dtype = next(feed, ())
        return dtype, not size  # 0-dim tensors count less in type promotion
    cls = type(arg)
    if cls in _NUMBERS:
        return cls
    if KINDS.get(cls) == VALUE:
        return arg
    if cls is list:
        kinds = [_kind(item, feed) for item in arg]
        return frozenset(kinds) if TENSOR_SLOT in arg else tuple(kinds)  # cat, stack: any number of tensors
    raise ValueError("a kind of argument that no formula knows")
