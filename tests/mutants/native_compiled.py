"""Native mutants of what `torch.compile` generates, and of storages that are there for shapes only."""

from __future__ import annotations

from native import native

TRAINING = "compiled::a_compiled_program_computes_the_same_bits[training]"
STATISTICS = "compiled::running_statistics_stay_for_what_was_computed_beside_them"
GUARDS = "compiled::no_guard_depends_on_the_session[True] compiled::no_guard_depends_on_the_session[False]"

# As in `native_operators`.
# fmt: off

native(
    "compiled kernels", "compiled_kernels.h",
    ("kernels do not come to the session", "if («!is_switched_on()» || is_hidden() || !are_left_out(names)",
     "true", TRAINING),
    ("what kernels write to is not told",
     "if («kind == KernelArgument::WRITES») { auto own = c10::Symbol", "false", TRAINING),
    ("kernels of many arguments get the first one of each kind", "toList().get(«next[one]++»)", "0",
     TRAINING),
    ("constants that a kernel updates are handed to it",
     "if («!others» || !std::all_of(given.begin()", "true", STATISTICS),
    ("constants are not updated", "for (Update& one : updates_) «one.constant.copy_(one.copy);»", "",
     TRAINING),
    ("what an updated constant held is not kept", "if («!session->keep_copy_of(one.constant)») {", "false",
     STATISTICS),
    ("only one of the tensors over an updated constant is a copy",
     "return «value.toTensor().is_alias_of(one.constant)»; }; auto found",
     "value.toTensor().is_same(one.constant)", ""),
)
native(
    "guards of compiled graphs", "dynamo_guards.h",
    ("guards see our key when they are checked",
     "if («std::strcmp(range.name(), SEARCH) != 0» || !is_switched_on())", "true",
     "compiled::a_graph_serves_in_a_session_and_outside[outside]"),
)
native(
    "shapes without memory", "interposer.h",
    ("a number makes a FakeTensor's operator the session's",
     "return tensor.defined() && !«tensor.unsafeGetTensorImpl()->is_wrapped_number()»; };", "false", ""),
)
native(
    "shapes without memory", "placeholders.h",
    ("sizes that are symbols are compared",
     "if («storage->device_type() == c10::DeviceType::Meta || storage->sym_nbytes().is_symbolic()») return",
     "false", GUARDS),
    ("what has no memory counts",
     "return «storage->_mutable_data_ptr_no_checks().get() == nullptr» && storage->nbytes() > 0; }", "false",
     "compiled::storages_for_shapes_take_no_memory"),
)
