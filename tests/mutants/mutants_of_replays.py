"""The accounts, and what keeps rematerialization right and cheap."""

from __future__ import annotations

from typing import Any

from mutant import around, leaves, no, nothing, row, yes


@around
def without_room(make_ready: Any, self: Any, inputs: Any, signature: Any) -> int:
    return 0 if all(version.resident for version in inputs) else make_ready(self, inputs, signature)


@around
def released_before(collect: Any, self: Any, wanted: Any, operation: Any, *made: Any) -> None:
    for source in operation.inputs:
        if not source.resident:
            self._ledger.policy.released(source)
    collect(self, wanted, operation, *made)


# What is switched off, and how; below it, who must notice. A table, whose lines no formatter shall break.
# fmt: off

row(
    "accounting",
    ("the dead count as resident", "core.ledger:Ledger.collect_dead", leaves("resident_bytes"),
     "hazards_process::resident_bytes_are_what_the_process_holds"),
    ("what came back is not counted", "core.ledger:Ledger.restored", leaves("resident_bytes"),
     "rematerialization::outputs_that_are_there_are_left_alone"),
    ("a storage that grew counts as before", "core.ledger:Ledger.resized", nothing,
     "hazards_constants::storages_that_grow_and_shrink_are_counted"),
    ("the fast path does not look at the limit",
     "runtime.dispatch.slow_path:SlowPath.make_ready", without_room,
     "rematerialization::the_fast_path_keeps_to_the_budget"),
    ("a recomputed storage that goes still counts",
     "core.ledger:Ledger.drop_scratch", leaves("resident_bytes"),
     "rematerialization::what_was_recomputed_beside_the_target_is_kept_to_a_share"),
)
row(
    "replays",
    ("nothing is secured before its eviction", "core.recipes:Recipes.secure", yes,
     "hazards_mutation::weights_change_while_what_they_made_is_evicted hazards_modes::autocast_in_and_out"),
    ("a replay raises where the first run only warned", "runtime.ambient:_get_warn_only", no,
     "hazards_ambient::a_replay_is_as_strict_about_determinism_as_the_first_run"),
    ("dear inputs are not kept", "core.deallocation:Deallocation.keep_inputs", nothing,
     "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release"),
    ("inputs are as dear as their own operator",
     "core.pool:Policy.projected_cost", lambda self, node: node.cost,
     "rematerialization::a_perceptron_trains_in_two_fifths_of_its_peak"),
    ("kept inputs are never let go of", "core.deallocation:Deallocation.release_kept_inputs", nothing,
     "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release"),
    ("a kept input dies under the replay that reads it again",
     "core.deallocation:Deallocation.came_back",
     lambda self, operation: setattr(operation, "kept_inputs", ()),
     "rematerialization::a_kept_input_outlives_the_replay_that_reads_it_again"),
    ("all that was recomputed stays", "core.deallocation:Deallocation.trim", nothing,
     "rematerialization::what_was_recomputed_beside_the_target_is_kept_to_a_share"),
    ("nothing is planned", "core.rematerialize:LAST_PLANNED", 99,
     "rematerialization::a_replay_runs_nothing_twice_as_long_as_memory_suffices"),
    ("inputs are not locked while an operator waits", "core.rematerialize:Rematerializer._enter", nothing,
     "hazards_process::failing_operators_leave_no_locks "
     "rematerialization::a_replay_runs_nothing_twice_as_long_as_memory_suffices"),
    ("a stolen version is released before its successor is back",
     "core.rematerialize:Rematerializer._collect", released_before,
     "rematerialization::a_stolen_version_is_released_once_its_successor_is_back"),
)
