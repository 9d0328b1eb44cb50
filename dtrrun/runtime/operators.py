"""What the runtime must know about an operator: what it mutates, and whether it can be replayed.

Everything that PyTorch states itself is read from the schema and its tags; the tables hold what it does not
state (design note "schemas that lie").
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from dtrrun.runtime.ambient import family_of

aten = torch.ops.aten

# Outputs hold whatever the allocator returned: no recipe until something overwrites them whole.
_UNINITIALISED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::empty_quantized",
    "aten::new_empty",
    "aten::new_empty_strided",
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

# Only metadata changes hands, and no bounds are checked: an evicted storage may stay evicted.
_UNTOUCHING = {"aten::detach", "aten::alias", "aten::lift_fresh"}

# Change how large a storage is, or which one a tensor has.
_RESIZES = {"aten::resize_", "aten::resize_as_", "aten::_resize_output_"}
_RESHAPES_STORAGE = {"aten::set_", *_RESIZES}

# The results carry a conjugate or negative bit in place of new memory.
_LAZY_BITS = {"aten::_conj", "aten::_neg_view"}

# A workspace among the results, parts of which are never written: `--verify` must not compare it.
_OPAQUE_OUTPUT = {"aten::mkldnn_rnn_layer": 3, "aten::_cudnn_rnn": 3, "aten::cudnn_batch_norm": 3}

# Reads such a workspace as it is meant; copies, as hooks on saved tensors make them, have those parts too.
_READS_OPAQUE = {
    "aten::mkldnn_rnn_layer_backward",
    "aten::_cudnn_rnn_backward",
    "aten::cudnn_batch_norm_backward",
}

# Talk to the world outside of the process, or hand out memory: run, never replayed.
_UNREPLAYABLE = {
    "aten::record_stream",
    "aten::_pin_memory",
    "aten::pin_memory",
    "aten::from_file",
    "aten::_nested_tensor_from_mask",
    "aten::_efficientzerotensor",
    "aten::_lazy_clone",
    "aten::_ctc_loss",  # leaves a part of its output unwritten: other bits each time
    "aten::_cudnn_rnn_flatten_weight",  # its result is the parameters' memory, which C++ looks at unseen
    "aten::linalg_lstsq",  # its gelsy driver starts from pivots that nobody has set: other bits each time
}
_UNREPLAYABLE_NAMESPACES = {"fsdp", "profiler"}

# Other processes read and write the memory, also after the operator has returned; most of the schemas do not
# say which of their tensors are written to.
_COLLECTIVE_NAMESPACES = {
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "symm_mem",
    "_dtensor",
}


# What is registered under other names is somebody else's: its tags may say less than is so.
_OWN_NAMESPACES = {"aten", "prim", "prims", "rngprims", *_COLLECTIVE_NAMESPACES}


# Their kernels allocate a result of the inputs' size and make the tensor smaller at the end, not the storage.
_REDUCES_LAST = {
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::binary_cross_entropy",
    "aten::soft_margin_loss",
    "aten::col2im",
}

# How much they make depends on numbers that are not part of a signature elsewhere.
_SIZED_BY_NUMBERS = {"aten::arange", "aten::range"}


# Their formulas for gradients ask whether a mode is on, and compute other bits then (`mode_checks`).
_CHECKS_MODES = {
    "aten::prod",
    "aten::cumprod",
    "aten::masked_fill",
    "aten::_linalg_det",
    "aten::_linalg_slogdet",
    "aten::linalg_eig",
    "aten::_linalg_eigh",
    "aten::ormqr",
    "aten::linalg_householder_product",
}


# Their kernels take another way where the same tensor is given twice, and compute other bits then.
_COMPARES_TENSORS = {"aten::_native_multi_head_attention"}

# Outputs (by position) that a composite looks into in the backward pass, before any operator reads them.
_READ_UNSEEN = {"aten::_pack_padded_sequence": 1}

AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
"""By type of device: where an operator has a kernel if autocast casts it, and is off within."""

# Kernels that call other operators, which autocast may cast: its state has to be the program's then. The
# kernel of a foreign operator may call anything.
_CALLS_OTHERS = {
    "aten::_transformer_encoder_layer_fwd",
    "aten::_trilinear",
    "aten::linalg_matrix_exp",
    "aten::linalg_pinv",
}


class Statistics(NamedTuple):
    """Running statistics among an operator's arguments, which a training-mode call does not read."""

    positions: tuple[int, int]
    flag: int  # position of the argument which says that this is training
    updates: bool  # whether the call writes to them
    replay: Any = None  # the operator to replay with None for both, if not the same


# These update their running statistics without (`native_batch_norm`) or in spite of a replay's needs. Without
# the statistics the result is the same, so that a replay leaves them out.
_STATISTICS = {
    "aten::native_batch_norm": Statistics((3, 4), 5, True),
    "aten::_native_batch_norm_legit": Statistics((3, 4), 5, True, aten.native_batch_norm.default),
    "aten::cudnn_batch_norm": Statistics((3, 4), 5, True),
    "aten::miopen_batch_norm": Statistics((3, 4), 5, True),
    "aten::native_batch_norm_backward": Statistics((3, 4), 7, False),
}


# Write without saying so: to their reserve space (derivatives.yaml clones it where it is needed again), or to
# running statistics (the CUDA kernels of SyncBatchNorm).
_WRITES_UNSAID = {
    "aten::_cudnn_rnn_backward": (20,),
    "aten::cudnn_batch_norm_backward": (8,),
    "aten::batch_norm_backward": (10,),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}

# Make what cuDNN advances at every call that is given it: nothing may be recomputed from it.
_KEEPS_STATE = {"aten::_cudnn_init_dropout_state"}


class Operator:
    """The facts about one `OpOverload`, computed once.

    `mutates`: positions (int) and names (str) of the arguments that it writes to. `grows`: and whose storage
    it may grow for that. `foreign`: not PyTorch's own; it may draw random numbers without saying so.
    `generator`: the position and the name of the argument that it draws from. `makes_tensors`: some result is
    a tensor that is none of the arguments. `tracks_views`: autograd notes its views and mutations above us.
    `simple`: fit for the dispatch mode's short cut.
    """

    __slots__ = (
        "autocasts",
        "call",
        "calls_others",
        "checks_modes",
        "collective",
        "compares_tensors",
        "composite",
        "dynamic",
        "family",
        "foreach",
        "foreign",
        "generator",
        "grows",
        "higher_order",
        "keeps_state",
        "lazy_bits",
        "makes_tensors",
        "mutates",
        "name",
        "opaque_output",
        "overwrites",
        "pointwise",
        "random",
        "read_unseen",
        "reads_opaque",
        "reduces",
        "replayable",
        "reshapes_storage",
        "shares_memory",
        "simple",
        "sized_by_numbers",
        "statistics",
        "takes_storage",
        "tracks_views",
        "uninitialised",
        "untouching",
        "unversioned",
        "updates_lists",
        "view",
    )

    def __init__(self, func: Any) -> None:
        self.higher_order = not isinstance(func, torch._ops.OpOverload)
        # What OpOverload.__call__ calls; for the short cut, where each Python function counts.
        self.call: Any = func._op if type(func) is torch._ops.OpOverload else func
        if self.higher_order:
            self.name = func.name()
            self.simple = self.lazy_bits = self.checks_modes = self.updates_lists = self.foreign = False
            return
        schema = func._schema
        name: str = schema.name
        namespace = name.partition("::")[0]
        tags = func.tags
        self.foreign = namespace not in _OWN_NAMESPACES
        self.name = name.replace("::", ".")
        # Inference mode hands these over whole; taken apart, their parts come to us one by one.
        self.composite = _has_kernel(func, "CompositeImplicitAutograd") and not (
            _has_kernel(func, "CPU") or _has_kernel(func, "CUDA")
        )
        self.tracks_views = _has_kernel(func, "ADInplaceOrView")
        self.mutates: tuple[int | str, ...] = ()
        self.view = False
        if name in _RESIZES:  # tagged as below, but the memory may become another
            self.mutates = (0,)
        elif torch.Tag.inplace_view in tags:  # t_, squeeze_, ...: writes the tensor's shape, not its memory
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
        # On a CPU autograd sees these mutations in the operators called in turn: under a mode never.
        self.unversioned = name.startswith("aten::_foreach_") and bool(self.mutates)
        # Of whatever length, and gives nothing back: `lists`.
        self.updates_lists = (
            self.foreach
            and bool(self.mutates)
            and not schema.returns
            and all(isinstance(place, int) for place in self.mutates)
        )
        self.makes_tensors = any(
            "Tensor" in str(result.type) and result.alias_info is None for result in schema.returns
        )
        self.sized_by_numbers = self.foreign or name in _SIZED_BY_NUMBERS
        self.reshapes_storage = name in _RESHAPES_STORAGE
        out = any(argument.is_out for argument in schema.arguments)  # the tag is new in PyTorch 2.13
        self.grows = self.reshapes_storage or out
        self.uninitialised = name in _UNINITIALISED
        if name in _STATISTICS and func._overloadname != "default":
            self.mutates = tuple({*_STATISTICS[name].positions, *self.mutates})
        self.overwrites = name in _OVERWRITES or (
            out and all(isinstance(place, str) for place in self.mutates)
        )
        self.pointwise = torch.Tag.pointwise in tags and namespace == "aten" and not self.foreach
        self.untouching = name in _UNTOUCHING
        self.family = family_of(namespace, name.partition("::")[2])
        self.autocasts = tuple(kind for kind in AUTOCAST if _has_kernel(func, AUTOCAST[kind]))
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.calls_others = self.foreign or name in _CALLS_OTHERS
        self.generator = next(
            (
                (position, argument.name)
                for position, argument in enumerate(schema.arguments)
                if "Generator" in str(argument.type)
            ),
            None,
        )
        self.dynamic = torch.Tag.dynamic_output_shape in tags
        self.collective = namespace in _COLLECTIVE_NAMESPACES
        self.replayable = not (
            self.collective or name in _UNREPLAYABLE or namespace in _UNREPLAYABLE_NAMESPACES
        )
        self.statistics = _STATISTICS.get(name) if func._overloadname == "default" else None
        if self.statistics is not None:
            self.mutates = ()
        if name in _WRITES_UNSAID:
            self.mutates = _WRITES_UNSAID[name]
        self.keeps_state = name in _KEEPS_STATE
        self.takes_storage = "Storage" in func._overloadname
        self.shares_memory = name == "aten::_lazy_clone"  # of two storages, until one of them is written to
        self.opaque_output = _OPAQUE_OUTPUT.get(name, -1)
        self.reads_opaque = name in _READS_OPAQUE
        self.compares_tensors = name in _COMPARES_TENSORS
        self.read_unseen = _READ_UNSEEN.get(name, -1)
        self.reduces = name in _REDUCES_LAST
        self.lazy_bits = name in _LAZY_BITS
        self.checks_modes = name.removesuffix("_") in _CHECKS_MODES
        special = (
            self.composite
            or self.uninitialised
            or self.reshapes_storage
            or self.random
            or self.sized_by_numbers
            or self.statistics is not None
            or not self.replayable
            or self.opaque_output >= 0
            or self.keeps_state
            or self.calls_others
            or self.compares_tensors
            or self.read_unseen >= 0
            or "nest" in name
            or "quantize" in name
        )
        self.simple = not special and (
            self.mutates == () or (self.mutates == (0,) and not self.overwrites and not self.foreach)
        )

    def generators_of(self, args: Any, kwargs: dict[str, Any]) -> list[torch.Generator]:
        """Those that a call is given to draw from."""
        if self.foreign:
            return [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Generator)]
        if not self.random or self.generator is None:
            return []
        position, name = self.generator
        given = kwargs.get(name, args[position] if position < len(args) else None)
        return [] if given is None else [given]


@cache
def operator_of(func: Any) -> Operator:
    """The facts about `func`; sessions share them."""
    return Operator(func)


def _has_kernel(func: Any, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    except RuntimeError:  # prim::device, by which a subclass is asked: not the dispatcher's
        return False
