"""What the runtime must know about an operator: what it mutates, and whether it can be replayed.

What PyTorch declares is read from the schema and its tags. The tables below have what a schema leaves out or
states wrongly.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from dtrrun.runtime.dispatch.kernels import replaces_own_kernel

aten = torch.ops.aten

# Outputs are wholly or partly uninitialised: no recipe until something overwrites them completely.
_UNINITIALISED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::empty_quantized",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize",
    "aten::resize_as",
}

# In-place operators that write every element of the tensor they are called on without reading any.
_OVERWRITES = {
    "aten::fill_",
    "aten::zero_",
    "aten::copy_",
    "aten::normal_",
    "aten::uniform_",
    "aten::bernoulli_",
    "aten::random_",
    "aten::exponential_",
    "aten::geometric_",
    "aten::cauchy_",
    "aten::log_normal_",
}

# These change only metadata and check no bounds, so an evicted storage may stay evicted.
_UNTOUCHING = {"aten::detach", "aten::alias", "aten::lift_fresh"}

# These change a storage's size, or which storage a tensor has.
_RESIZES = {"aten::resize_", "aten::resize_as_", "aten::_resize_output_"}
_RESHAPES_STORAGE = {"aten::set_", *_RESIZES}

# One result is a workspace, parts of which are never written: `--verify` must not compare it.
_OPAQUE_OUTPUT = {"aten::mkldnn_rnn_layer": 3, "aten::_cudnn_rnn": 3, "aten::cudnn_batch_norm": 3}

# Operators that read only the written parts of a workspace; copies (hooks on saved tensors) read all of it.
_READS_OPAQUE = {
    "aten::mkldnn_rnn_layer_backward",
    "aten::_cudnn_rnn_backward",
    "aten::cudnn_batch_norm_backward",
}

# These communicate with other processes, hand out memory or are not reproducible: never replayed.
_UNREPLAYABLE = {
    "aten::record_stream",
    "aten::_pin_memory",
    "aten::pin_memory",
    "aten::from_file",
    "aten::_nested_tensor_from_mask",
    "aten::_efficientzerotensor",
    "aten::_lazy_clone",
    "aten::_ctc_loss",  # leaves part of its output unwritten: not reproducible
    "aten::_cudnn_rnn_flatten_weight",  # returns the parameters' memory, which C++ reads unseen
    "aten::linalg_lstsq",  # its gelsy driver starts from uninitialised pivots: not reproducible
}
_UNREPLAYABLE_NAMESPACES = {"fsdp", "profiler"}

# Objects that a recipe cannot copy, and that may change: a foreign operator that takes one is not replayed.
_OBJECTS = "__torch__", "PyObject", "Any"
# Namespaces of PyTorch operators that pack weights into objects, which are only read.
PACKED_NAMESPACES = {
    "_quantized",
    "xnnpack",
    "quantized",
    "sparse",
    "prepacked",
    "mkldnn_prepacked",
    "mkl_prepacked",
}

# Other processes read and write the memory, even after the operator has returned, and most schemas do not
# declare which tensors are written to.
_COLLECTIVE_NAMESPACES = {
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "symm_mem",
    "_dtensor",
}


KERNELS = "inductor_kernel"
"""The namespace of kernels that `torch.compile` has generated (`runtime/compiled`). No library has it."""

# Operators in other namespaces are foreign: their tags may be incomplete.
OWN_NAMESPACES = {"aten", "prim", "prims", "rngprims", "profiler", KERNELS, *_COLLECTIVE_NAMESPACES}


# Their kernels allocate a result of the inputs' size, then shrink the tensor but not the storage.
_REDUCES_LAST = {
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::binary_cross_entropy",
    "aten::soft_margin_loss",
    "aten::col2im",
}

# Their allocations depend on numbers that are not otherwise part of a signature.
_SIZED_BY_NUMBERS = {"aten::arange", "aten::range"}


_MATMULS = {
    *("mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "addr", "mv", "dot", "vdot"),
    *("_addmm_activation", "_int_mm", "_trilinear", "_euclidean_dist", "_cdist_forward", "_cdist_backward"),
}

# Their kernels take another path if the same tensor is passed twice, and then compute different bits.
_COMPARES_TENSORS = {"aten::_native_multi_head_attention"}

# Outputs (by position) that a composite reads in the backward pass before any operator does.
_READ_UNSEEN = {"aten::_pack_padded_sequence": 1}

# Kernels that call other operators, which autocast may cast: they need the program's autocast state. Foreign
# kernels may call anything, and need it too.
_CALLS_OTHERS = {
    "aten::_transformer_encoder_layer_fwd",
    "aten::_trilinear",
    "aten::linalg_matrix_exp",
    "aten::linalg_pinv",
}


class RunningStatistics(NamedTuple):
    """Running statistics among an operator's arguments, which a training-mode call does not read."""

    positions: tuple[int, int]
    flag: int | None  # position of the argument that enables training mode; None if it is always on
    updates: bool  # whether the call writes to them
    replay: Any = None  # the operator to replay with None for both, if it differs


# These update running statistics without declaring it (`native_batch_norm`), or in a way that a replay must
# not repeat. Without the statistics the result is the same, so a replay omits them.
_STATISTICS = {
    "aten::native_batch_norm": RunningStatistics((3, 4), 5, True),
    "aten::_native_batch_norm_legit": RunningStatistics((3, 4), 5, True, aten.native_batch_norm.default),
    "aten::cudnn_batch_norm": RunningStatistics((3, 4), 5, True),
    "aten::miopen_batch_norm": RunningStatistics((3, 4), 5, True),
    "aten::native_batch_norm_backward": RunningStatistics((3, 4), 7, False),
    # These take statistics only for the gradient formula (cudnn/BatchNorm.cpp, miopen/BatchNorm_miopen.cpp).
    "aten::cudnn_batch_norm_backward": RunningStatistics((3, 4), None, False),
    "aten::miopen_batch_norm_backward": RunningStatistics((3, 4), None, False),
}


# In-place operators whose CUDA kernels allocate all of their workspace before they write to anything.
_ALLOCATES_FIRST = {
    "aten::addmm_",
    "aten::baddbmm_",
    "aten::addmv_",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::index_add_",
    "aten::scatter_add_",
    "aten::masked_fill_",
    "aten::cudnn_batch_norm_backward",  # writes to its reserve space
}


# These write undeclared: to their reserve space (derivatives.yaml clones it if it is needed again), or to
# running statistics (the CUDA kernels of SyncBatchNorm).
_WRITES_UNSAID = {
    "aten::_cudnn_rnn_backward": (20,),
    "aten::cudnn_batch_norm_backward": (8,),
    "aten::batch_norm_backward": (10,),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}

# Their GPU library can do without a workspace, using another algorithm with different bits.
_CONVOLVES = {"aten::convolution", "aten::convolution_backward"}
# Libraries that choose and load a kernel depending on their arguments' sizes.
_CHOOSES_KERNELS = _CONVOLVES | {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}

# Their calls with parts of the lists compute the same (`native/split_lists.h`).
_SPLIT = (
    *("aten::_foreach_", "aten::_amp_foreach_"),
    *("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad"),
)

# They make state that cuDNN advances in every call that receives it: nothing may be recomputed from it.
_KEEPS_STATE = {"aten::_cudnn_init_dropout_state"}


class Operator:
    """The facts about one `OpOverload`, computed once.

    `mutates`: positions (int) and names (str) of the arguments that it writes to. `grows`: whether it may
    enlarge the storages of these. `foreign`: not PyTorch's own; it may draw random numbers undeclared.
    `makes_tensors`: some result is a tensor that is
    not an argument. `only_views`: its results are views; a composite view (`reshape`) may copy. `simple`:
    nothing about its calls has to be found out. `allocates_first`: on a GPU, an operator that writes to
    arguments writes to nothing before its last allocation.
    """

    __slots__ = (
        "allocates_first",
        "calls_others",
        "chooses_kernels",
        "collective",
        "compares_tensors",
        "composite",
        "convolves",
        "described",
        "dynamic",
        "foreach",
        "foreign",
        "general",
        "grows",
        "higher_order",
        "keeps_state",
        "makes_tensors",
        "mutates",
        "name",
        "only_views",
        "opaque_output",
        "overload",
        "overwrites",
        "overwrites_blank",
        "random",
        "read_unseen",
        "reads_opaque",
        "reduces",
        "replayable",
        "reshapes_storage",
        "shares_memory",
        "simple",
        "sized_by_numbers",
        "splits",
        "statistics",
        "takes_storage",
        "uninitialised",
        "untouching",
        "updates_lists",
        "view",
        "writes_beside",
    )

    def __init__(self, func: Any) -> None:
        self.overload = func  # kept alive: sessions know operators by the ids of their overloads
        self.described = repr(func)
        self.higher_order = not isinstance(func, torch._ops.OpOverload)
        if self.higher_order:
            self.name = func.name()
            self.simple = self.foreign = self.updates_lists = self.splits = False
            return
        schema = func._schema
        name: str = schema.name
        namespace = name.partition("::")[0]
        tags = func.tags
        self.foreign = namespace not in OWN_NAMESPACES or replaces_own_kernel(func)
        self.name = name.replace("::", ".")
        # Inference mode passes these on whole; outside it, we see the operators that they decompose into.
        self.composite = _has_kernel(func, "CompositeImplicitAutograd") and not (
            _has_kernel(func, "CPU") or _has_kernel(func, "CUDA")
        )
        self.mutates: tuple[int | str, ...] = ()
        self.view = False
        if name in _RESIZES:  # tagged as below, but the storage may change
            self.mutates = (0,)
        elif torch.Tag.inplace_view in tags:  # t_, squeeze_, ...: change the tensor's shape, not its memory
            self.view = True
        else:
            self.mutates = tuple(
                argument.name if argument.kwarg_only else position
                for position, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
            self.view = not self.mutates and any(
                result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
            )
        self.foreach = name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach"))
        # Lists of any length, and no result: see `lists`.
        self.updates_lists = (
            self.foreach
            and bool(self.mutates)
            and not schema.returns
            and all(isinstance(place, int) for place in self.mutates)
        )
        # Each place of its lists is handled by itself. Others return more than one list, or read a tensor
        # with a number for each place.
        self.splits = (
            name.startswith(_SPLIT)
            and len(schema.returns) <= 1
            and all(isinstance(result.type, torch.ListType) for result in schema.returns)
            and not any(one.name == "scalars" and str(one.type) == "Tensor" for one in schema.arguments)
        )
        self.makes_tensors = any(
            "Tensor" in str(result.type) and result.alias_info is None for result in schema.returns
        )
        self.sized_by_numbers = self.foreign or name in _SIZED_BY_NUMBERS
        self.reshapes_storage = name in _RESHAPES_STORAGE
        out = any(argument.is_out for argument in schema.arguments)  # the tag is new in PyTorch 2.13
        self.grows = self.reshapes_storage or out
        self.only_views = self.view and not (self.reshapes_storage or self.composite)
        self.uninitialised = name in _UNINITIALISED
        if name in _STATISTICS and func._overloadname != "default":
            self.mutates = tuple({*_STATISTICS[name].positions, *self.mutates})
        into_out = out and all(isinstance(place, str) for place in self.mutates)
        self.overwrites = name in _OVERWRITES or into_out
        # For memory that nothing has written to: the operator need not write to all of it.
        self.overwrites_blank = into_out or namespace == KERNELS
        pointwise = torch.Tag.pointwise in tags and namespace == "aten" and not self.foreach
        self.allocates_first = self.overwrites or pointwise or name in _ALLOCATES_FIRST
        self.untouching = name in _UNTOUCHING
        self.general = not reads_backends(namespace, name.partition("::")[2])
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.calls_others = self.foreign or name in _CALLS_OTHERS
        self.dynamic = torch.Tag.dynamic_output_shape in tags
        self.collective = namespace in _COLLECTIVE_NAMESPACES
        self.replayable = not (
            self.collective
            or name in _UNREPLAYABLE
            or namespace in _UNREPLAYABLE_NAMESPACES
            or (self.foreign and namespace not in PACKED_NAMESPACES and _takes_objects(schema))
        )
        self.statistics = _STATISTICS.get(name) if func._overloadname == "default" else None
        if self.statistics is not None:
            self.mutates = ()
        if name in _WRITES_UNSAID:
            self.mutates = _WRITES_UNSAID[name]
        self.keeps_state = name in _KEEPS_STATE
        self.convolves = name in _CONVOLVES
        self.chooses_kernels = name in _CHOOSES_KERNELS
        self.takes_storage = "Storage" in func._overloadname
        self.shares_memory = name == "aten::_lazy_clone"  # between two storages, until one is written to
        self.opaque_output = _OPAQUE_OUTPUT.get(name, -1)
        self.reads_opaque = name in _READS_OPAQUE
        self.compares_tensors = name in _COMPARES_TENSORS
        self.read_unseen = _READ_UNSEEN.get(name, -1)
        self.reduces = name in _REDUCES_LAST
        # They change one input, a workspace; the others are only read.
        self.writes_beside = name in _WRITES_UNSAID and len(self.mutates) == 1
        special = (
            self.composite
            or self.reshapes_storage
            or not self.replayable
            or self.keeps_state
            or self.calls_others
            or self.compares_tensors
            or self.read_unseen >= 0
            or "nest" in name
            or "quantize" in name
        )
        into_tensors = (
            not self.foreach
            and not self.dynamic
            and (
                namespace == KERNELS
                or (
                    self.overwrites
                    and all(str(one.type) == "Tensor" for one in schema.arguments if one.is_out)
                )
            )
        )
        self.simple = not special and (
            self.mutates == ()
            or (self.mutates == (0,) and not self.foreach)
            or self.writes_beside
            or into_tensors
        )

    def __repr__(self) -> str:
        """Return an identifier that is the same in every process: signature keys contain it."""
        return self.described


@cache
def operator_of(func: Any) -> Operator:
    """Return the facts about `func`, shared by all sessions."""
    return Operator(func)


def reads_backends(namespace: str, name: str) -> bool:
    """Return whether an operator's kernels may read backend settings, such as a precision.

    name: without namespace and overload. Operators outside `aten` may read anything.
    """
    parts = ("linear", "_dot_product_", "conv", "rnn", "lstm", "gru", "linalg")
    return namespace != "aten" or name in _MATMULS or any(part in name for part in parts)


def _takes_objects(schema: Any) -> bool:
    return any(kind in str(argument.type) for argument in schema.arguments for kind in _OBJECTS)


def _has_kernel(func: Any, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    except RuntimeError:  # prim::device, called for a subclass: not in the dispatcher
        return False
