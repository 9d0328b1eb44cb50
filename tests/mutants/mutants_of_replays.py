"""The accounts, and what keeps rematerialization right and cheap."""

from __future__ import annotations

from mutant import leaves, no, nothing, row, yes

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
)
row(
    "replays",
    ("nothing is secured before its eviction", "core.recipes:Recipes.secure", yes,
     "hazards_mutation::weights_change_while_what_they_made_is_evicted hazards_modes::autocast_in_and_out"),
    ("a replay raises where the first run only warned", "runtime.ambient:_get_warn_only", no,
     "hazards_ambient::a_replay_is_as_strict_about_determinism_as_the_first_run"),
    ("kept inputs are never let go of", "core.deallocation:Deallocation.release_kept_inputs", nothing,
     "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release"),
    ("inputs are not locked while an operator waits", "core.rematerialize:Rematerializer._enter", nothing,
     "hazards_process::failing_operators_leave_no_locks "
     "rematerialization::a_replay_runs_nothing_twice_as_long_as_memory_suffices"),
)
