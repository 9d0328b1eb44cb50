"""Names the formula for an operator's allocations, if they follow from the sizes of its inputs alone.

PyTorch's shape functions know every operator, but take as long as a small kernel: too long for programs whose
shapes hardly repeat. `native/formulas.h` has the formulas, and learns the sizes of elements. For operators
without a formula, and for unusual calls, the shape function is called every time.
"""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.runtime.operators import Operator

aten = torch.ops.aten

ELEMENTWISE = {
    "aten::_to_copy",
    "aten::empty_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::_softmax",
    "aten::_log_softmax",
    "aten::_softmax_backward_data",
    "aten::_log_softmax_backward_data",
}
"""One dense result with the broadcast size of the inputs. Operators tagged as pointwise need no entry."""

TABLE: dict[Any, str] = {
    aten.mm.default: "product",
    aten.addmm.default: "product",
    aten.bmm.default: "product",
    aten.baddbmm.default: "product",
    aten.cat.default: "all",
    aten.stack.default: "all",
    aten.slice_backward.default: "given",
    aten.select_backward.default: "given",
    aten.sum.default: "one",
    aten.mean.default: "one",
    aten.sum.dim_IntList: "reduced",
    aten.mean.dim: "reduced",
    aten.unsafe_split.Tensor: "nothing",  # views, although not according to the schema
    aten.unsafe_split_with_sizes.default: "nothing",
    aten._unsafe_view.default: "nothing",
    aten.embedding.default: "embedding",
    aten.embedding_dense_backward.default: "embedding_backward",
    aten.native_batch_norm.default: "batch_norm",
    aten.native_batch_norm_backward.default: "batch_norm_backward",
    aten.native_layer_norm.default: "layer_norm",
    aten.native_layer_norm_backward.default: "layer_norm_backward",
    aten.native_group_norm.default: "group_norm",
    aten.native_group_norm_backward.default: "group_norm_backward",
    aten.convolution.default: "convolution",
    aten.convolution_backward.default: "convolution_backward",
    aten.native_dropout.default: "first_twice",
    aten.native_dropout_backward.default: "first",
    aten.cumsum.default: "first",
    aten.tril.default: "first",
    aten.triu.default: "first",
    aten.flip.default: "first",
    aten.roll.default: "first",
    aten.sort.default: "first_twice",
    aten.scatter.src: "first",
    aten.scatter.value: "first",
    aten.scatter_add.default: "first",
    aten.index_add.default: "first",
    aten.nll_loss_forward.default: "nll_loss",
    aten.nll_loss_backward.default: "second",
    aten.max_pool2d_with_indices.default: "max_pool",
    aten.max_pool2d_with_indices_backward.default: "second",
    aten.avg_pool2d.default: "avg_pool",
    aten.avg_pool2d_backward.default: "second",
    aten.empty.memory_format: "shaped",
    aten.zeros.default: "shaped",
    aten.ones.default: "shaped",
    aten.full.default: "shaped",
    aten.rand.default: "shaped",
    aten.randn.default: "shaped",
    aten.randint.default: "shaped",
    aten.randint.low: "shaped",
    aten.new_zeros.default: "shaped",
    aten.new_ones.default: "shaped",
    aten.new_full.default: "shaped",
    aten.new_empty.default: "shaped",
    aten.arange.default: "counted",
    aten.arange.start: "counted",
    aten.arange.start_step: "counted",
}
"""The names are those of `Formula` in `native/operator_info.h`."""


def name_of(func: Any, operator: Operator) -> str | None:
    """Return the name of an operator's formula; None if it has none."""
    if not operator.grows and not operator.makes_tensors:
        return "nothing"
    if (
        operator.mutates
        or operator.view
        or operator.composite  # may return an input unchanged
        or operator.reduces
        or operator.opaque_output >= 0
    ):
        return None
    schema = func._schema
    if schema.name in ELEMENTWISE and func._overloadname == "default":
        return "elementwise"
    if (
        torch.Tag.pointwise in func.tags
        and func.namespace == "aten"  # tags of other operators are not reliable
        and [str(result.type) for result in schema.returns] == ["Tensor"]
    ):
        return "elementwise"
    return TABLE.get(func)
