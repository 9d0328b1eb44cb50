"""Operators that arrive with their callers' arguments, through kernels of their own type."""

import itertools
import re
import warnings
from pathlib import Path

import pytest
import torch
from programs import assert_same, plain, run_inside

import dtrrun
from dtrrun.extensions import build

pytestmark = pytest.mark.usefixtures("extension")

HEADER = Path(dtrrun.__file__).parent / "native" / "typed_kernels.h"
EXAMPLES = re.findall(r"\bops::(\w+)", HEADER.read_text().partition("known() {")[2].partition("namespace")[2])
ATEN = torch.ops.aten


def fill(*size, dtype=torch.float32):
    return torch.linspace(-2, 2, torch.Size(size).numel()).reshape(size).to(dtype)


X, Y, V, INDEX = fill(4, 6), fill(4, 6) * 3, fill(6), torch.tensor([[2, 0, 1], [1, 1, 0]])
IMAGES, FILTERS = fill(2, 4, 5, 6), fill(3, 4, 3, 3)
LIKE = {"dtype": torch.float64, "layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False}

# By the operator's name in C++: its overload and arguments. What an operator writes to is copied first.
CALLS = {
    "relu": (ATEN.relu.default, X),
    "relu_": (ATEN.relu_.default, X),
    "mul_Tensor": (ATEN.mul.Tensor, X, Y),
    "mul__Tensor": (ATEN.mul_.Tensor, X, Y),
    "div_Scalar": (ATEN.div.Scalar, X, 3),
    "div__Scalar": (ATEN.div_.Scalar, X, 3),
    "pow_Scalar": (ATEN.pow.Scalar, 2, X),
    "add_Tensor": (ATEN.add.Tensor, X, Y, {"alpha": 2}),
    "add__Tensor": (ATEN.add_.Tensor, X, Y, {"alpha": 2}),
    "add_Scalar": (ATEN.add.Scalar, X, 1.5, 2),
    "add__Scalar": (ATEN.add_.Scalar, X, 1.5, 2),
    "where_self": (ATEN.where.self, X > 0, X, Y),
    "lerp__Tensor": (ATEN.lerp_.Tensor, X, Y, Y),
    "addcmul": (ATEN.addcmul.default, X, Y, Y, {"value": 0.5}),
    "addcmul_": (ATEN.addcmul_.default, X, Y, Y, {"value": 0.5}),
    "clamp": (ATEN.clamp.default, X, None, 0.5),
    "gelu": (ATEN.gelu.default, X, {"approximate": "tanh"}),
    "gelu_backward": (ATEN.gelu_backward.default, Y, X, {"approximate": "tanh"}),
    "native_dropout": (ATEN.native_dropout.default, X, 0.5, True),
    "native_dropout_backward": (ATEN.native_dropout_backward.default, X, Y > 0, 2.0),
    "bernoulli__float": (ATEN.bernoulli_.float, X, 0.5, {"generator": "a generator"}),
    "mse_loss": (ATEN.mse_loss.default, X, Y, 2),
    "view": (ATEN.view.default, X, [2, -1]),
    "expand": (ATEN.expand.default, V, [3, -1]),
    "permute": (ATEN.permute.default, X, [1, 0]),
    "transpose_int": (ATEN.transpose.int, X, 0, 1),
    "unsqueeze": (ATEN.unsqueeze.default, X, 1),
    "select_int": (ATEN.select.int, X, 1, 2),
    "slice_Tensor": (ATEN.slice.Tensor, X, 1, 1, None, 2),
    "as_strided": (ATEN.as_strided.default, X, [2, 3], [1, 4], 2),
    "_reshape_alias": (ATEN._reshape_alias.default, X, [6, 4], [4, 1]),
    "unbind_int": (ATEN.unbind.int, X, 1),
    "split_Tensor": (ATEN.split.Tensor, X, 4, 1),
    "split_with_sizes": (ATEN.split_with_sizes.default, X, [1, 5], 1),
    "select_backward": (ATEN.select_backward.default, V, [4, 6], 0, 1),
    "slice_backward": (ATEN.slice_backward.default, X, [8, 6], 0, 1, 8, 2),
    "empty_memory_format": (ATEN.empty.memory_format, [0, 3], LIKE),
    "empty_strided": (ATEN.empty_strided.default, [0, 3], [3, 1], LIKE),
    "new_empty": (ATEN.new_empty.default, X, [0, 3], LIKE),
    "zeros": (ATEN.zeros.default, [2, 3], LIKE),
    "full": (ATEN.full.default, [2, 3], 1.5, LIKE),
    "zeros_like": (ATEN.zeros_like.default, X, LIKE | {"memory_format": torch.preserve_format}),
    "arange": (ATEN.arange.default, 7, LIKE),
    "clone": (ATEN.clone.default, X, {"memory_format": torch.contiguous_format}),
    "_to_copy": (ATEN._to_copy.default, X, LIKE),
    "copy_": (ATEN.copy_.default, X, Y, True),
    "sum": (ATEN.sum.default, X, {"dtype": torch.float64}),
    "sum_dim_IntList": (ATEN.sum.dim_IntList, X, [1], True, {"dtype": torch.float64}),
    "amax": (ATEN.amax.default, X, [1], True),
    "max_dim": (ATEN.max.dim, X, 1, True),
    "_softmax": (ATEN._softmax.default, X, 1, False),
    "_softmax_backward_data": (ATEN._softmax_backward_data.default, Y, X, 1, torch.float32),
    "linalg_vector_norm": (ATEN.linalg_vector_norm.default, X, 3, [1], True, {"dtype": torch.float64}),
    "cumsum": (ATEN.cumsum.default, X, 1, {"dtype": torch.float64}),
    "addmm": (ATEN.addmm.default, fill(4, 4), X, Y.t(), {"beta": 2, "alpha": 0.5}),
    "addmm_": (ATEN.addmm_.default, fill(4, 4), X, Y.t(), {"beta": 2, "alpha": 0.5}),
    "native_layer_norm": (ATEN.native_layer_norm.default, X, [6], V, None, 1e-5),
    "native_layer_norm_backward": (
        *(ATEN.native_layer_norm_backward.default, Y, X, [6], fill(4, 1), fill(4, 1), V, None),
        [True, True, False],
    ),
    "gather": (ATEN.gather.default, X, 1, INDEX, {"sparse_grad": False}),
    "index_select": (ATEN.index_select.default, X, 1, INDEX[0]),
    "convolution": (ATEN.convolution.default, IMAGES, FILTERS, None, [1, 2], [1], [1, 1], False, [0, 0], 1),
    "convolution_backward": (
        *(ATEN.convolution_backward.default, fill(2, 3, 5, 3), IMAGES, FILTERS, [3], [1, 2], [1], [1, 1]),
        *(False, [0, 0], 1, [True, False, True]),
    ),
    # Without a GPU, these fail in every way of calling them.
    "cudnn_batch_norm": (ATEN.cudnn_batch_norm.default, IMAGES, V[:4], V[:4], None, None, True, 0.1, 1e-5),
    "cudnn_batch_norm_backward": (
        *(ATEN.cudnn_batch_norm_backward.default, IMAGES, IMAGES, V[:4], None, None, V[:4], V[:4]),
        *(1e-5, V),
    ),
    "native_batch_norm": (ATEN.native_batch_norm.default, IMAGES, V[:4], None, None, None, True, 0.1, 1e-5),
    "native_batch_norm_backward": (
        *(ATEN.native_batch_norm_backward.default, IMAGES * 2, IMAGES, V[:4], None, None, V[:4]),
        *(V[:4].exp(), True, 1e-5, [True, True, False]),
    ),
    "softplus_backward": (ATEN.softplus_backward.default, Y, X, 2, 20.0),
    "cat": (ATEN.cat.default, [X, Y, X], 1),
    "stack": (ATEN.stack.default, [X, Y, X], -1),
    "constant_pad_nd": (ATEN.constant_pad_nd.default, X, [1, 0, 0, 2], 0.5),
}


def call(name):
    """Return what an operator returns for new tensors, and what it has written to."""
    op, *given = CALLS[name]
    named = dict(given.pop()) if isinstance(given[-1], dict) else {}
    if "generator" in named:
        named["generator"] = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    args = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
    try:
        result = op(*args, **named)
    except NotImplementedError as error:
        result = str(error)
    return args[0], result


def is_unboxed(op):
    return f"\n{build.KEY}: by dtrrun, unboxed :: " in torch._C._dispatch_dump(op.name())


def test_each_example_arrives_by_a_kernel():
    assert set(EXAMPLES) == set(CALLS)
    with dtrrun.budget(None, device="cpu"):
        pass
    assert [name for name, (op, *_) in CALLS.items() if not is_unboxed(op)] == []
    assert not is_unboxed(ATEN.index.Tensor)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("careful", [False, True])
def test_a_kernel_for_each_type_computes_the_same_bits(careful, verify):
    """They do with care and without, and also when results are recomputed."""

    def program():
        return {name: [call(name) for _ in range(3)] for name in CALLS}

    expected = plain(program)
    found, report = run_inside(program, 1, careful=careful, verify=verify, over_budget="evict")
    assert_same(expected, found, "under stress")
    assert report["evictions"] > 100


def test_lists_of_numbers_are_not_taken_for_each_other():
    def program():
        return [ATEN.constant_pad_nd(X, place, 0.5) for place in itertools.product(range(4), repeat=4)]

    expected = plain(program)
    found, report = run_inside(program, 1, over_budget="evict")
    assert_same(expected, found, "under stress")
    assert report["rematerializations"] > 100


def test_a_kernel_that_the_program_has_replaced_returns_its_results():
    """It is called with its arguments as values, and so it returns."""

    def program():
        return [call("relu"), call("max_dim")]

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that there was a kernel
        library.impl("relu", lambda x: x.clamp(min=0) + 1, "CPU")
        library.impl("max.dim", lambda x, dim, keep=False: (x.sum(dim, keep), x.argmin(dim, keep)), "CPU")
        expected = plain(program)
        found, _ = run_inside(program, 1, over_budget="evict")
    assert_same(expected, found, "under stress")
    assert expected != plain(program)
