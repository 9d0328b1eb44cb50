"""Ways to memory that are no plain operator: escapes, native code, foreign memory, layouts, set_."""

from __future__ import annotations

from typing import Any

import torch
from mutant import around, no, nothing, row, yes
from torch.autograd.function import BackwardCFunction

PATCHES = "runtime.patches.registry:Patches.wrap"


def all_but(owner: Any, name: str) -> around:
    """A session replaces everything but this."""

    def wrap(original: Any, self: Any, *place: Any) -> None:
        if place[:2] != (owner, name):
            original(self, *place)

    return around(wrap)


def by_tensor() -> around:
    """Whatever storage a tensor gets, it is looked up by its first one."""
    seen: dict[int, Any] = {}
    return around(lambda storage_of, tensor: seen.setdefault(id(tensor), storage_of(tensor)))


# What is switched off, and how; below it, who must notice. A table, whose lines no formatter shall break.
# fmt: off

row(
    "escapes",
    ("reads are not seen", "runtime.patches.escapes:READS", (), "hazards_escapes::reads"),
    ("writes are not seen", "runtime.patches.escapes:WRITES", (), "hazards_escapes::writes"),
    ("memory is handed out unseen", "runtime.patches.escapes:EXPOSES", (),
     "hazards_escapes::arrays_stay_valid_and_are_written_to_later"),
    ("what is saved or copied counts as handed out", "runtime.patches.escapes:until_return", nothing,
     "hazards_saving::what_was_saved_can_be_evicted_afterwards"),
    ("what is read from an address is evicted meanwhile", "runtime.access:Access._keep", nothing,
     "hazards_saving::what_a_reader_was_handed_stays_where_it_is"),
    ("a storage that is asked for its size is handed out", "runtime.patches.escapes:is_asked_for_facts", no,
     "hazards_layouts::what_a_jagged_nested_tensor_holds_is_recomputed"),
    ("a storage is never handed out", "runtime.patches.escapes:is_asked_for_facts", yes,
     "hazards_escapes::a_storage_is_handed_out_only_where_it_can_be_kept"),
    ("every module may read from addresses", "runtime.patches.escapes:is_read", yes,
     "hazards_saving::other_modules_are_handed_memory_for_good"),
    ("constructors read evicted elements", "runtime.patches.escapes:NUMBERS", (),
     "hazards_escapes::reads surface::evicted_tensors_in_lists"),
    ("a replay runs under the program's modes",
     "runtime.execute:Executor.below", lambda self: torch.no_grad(),
     "hazards_program_modes::nested_modes_see_everything_once_and_in_order"),
)
row(
    "native extensions",
    ("a custom forward's inputs are not locked", PATCHES, all_but(torch.autograd.Function, "apply"),
     "hazards_functions::tensors_of_a_custom_function_stay_in_memory_while_it_runs"),
    ("a custom backward's gradients are not locked", PATCHES, all_but(BackwardCFunction, "apply"),
     "hazards_functions::tensors_of_a_custom_function_stay_in_memory_while_it_runs"),
    ("a custom backward's saved tensors are not locked", PATCHES, all_but(BackwardCFunction, "saved_tensors"),
     "hazards_functions::tensors_of_a_custom_function_stay_in_memory_while_it_runs"),
)
row(
    "storages that are not ours",
    ("foreign memory is taken for ours", "runtime.storage:is_ours", yes,
     "hazards_escapes::memory_that_is_not_ours faults_numpy::arrays_under_tensors_change_between_operators"),
)
row(
    "other layouts and subclasses",
    ("quantized results are taken for plain ones", "runtime.dispatch.outputs:is_odd", no,
     "hazards_layouts::sparse_and_quantized hazards_layouts::nested_tensors"),
)
row(
    ".data, set_, swap_tensors",
    ("set_ and resize_ are ordinary mutations", "runtime.operators:_RESHAPES_STORAGE", (),
     "hazards_mutation::resize_set_data_and_swap"),
    ("a storage is looked up by its tensor", "runtime.dispatch.callbacks:storage_of", by_tensor(),
     "hazards_mutation::resize_set_data_and_swap"),
)
