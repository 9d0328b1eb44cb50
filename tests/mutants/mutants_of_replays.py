"""The accounts, and what keeps rematerialization right and cheap."""

from mutant import row

row(
    "accounting",
    (
        "the dead count as resident",
        "storages",
        "                elif record.resident:\n                    self.resident_bytes -= record.nbytes\n",
        "                elif record.resident:\n                    pass\n",
        "hazards_process::resident_bytes_are_what_the_process_holds",
    ),
    (
        "what came back is not counted",
        "ledger",
        "        self.evicted_bytes -= record.nbytes\n        self.resident_bytes += record.nbytes\n",
        "        self.evicted_bytes -= record.nbytes\n",
        "rematerialization::outputs_that_are_there_are_left_alone",
    ),
    (
        "a storage that grew counts as before",
        "mutation",
        "            self.ledger.resized(record, nbytes)\n",
        "            pass\n",
        "hazards_constants::storages_that_grow_and_shrink_are_counted",
    ),
    (
        "the short cut does not look at the limit",
        "mode",
        "        if not whole or needed > ledger.limit or (signature.workspace and ledger.pressure):\n",
        "        if not whole or (signature.workspace and ledger.pressure):\n",
        "rematerialization::the_short_cut_keeps_to_the_budget",
    ),
    (
        "a recomputed storage that goes still counts",
        "storages",
        "            del self.blocks[place]\n            self.resident_bytes -= record.nbytes\n"
        "        record.held",
        "            del self.blocks[place]\n        record.held",
        "rematerialization::what_was_recomputed_beside_the_target_is_kept_to_a_share",
    ),
)
row(
    "replays",
    (
        "nothing is secured before its eviction",
        "ledger",
        "        return self.secure(record)\n",
        "        return True\n",
        "hazards_mutation::weights_change_while_what_they_made_is_evicted hazards_modes::autocast_in_and_out",
    ),
    (
        "dear inputs are not kept",
        "ledger",
        "            self._keep_inputs(record, storage)\n",
        "",
        "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release",
    ),
    (
        "inputs are as dear as their own operator",
        "ledger",
        "self.policy.projected_cost(source)",
        "source.cost",
        "rematerialization::a_perceptron_trains_in_two_fifths_of_its_peak",
    ),
    (
        "kept inputs are never let go of",
        "replay",
        "            if self._came_back and not self.ledger.replaying:\n",
        "            if False:\n",
        "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release",
    ),
    (
        "a kept input dies under the replay that reads it again",
        "replay",
        "self._came_back.append((op, op.kept))",
        "op.kept = ()",
        "rematerialization::a_kept_input_outlives_the_replay_that_reads_it_again",
    ),
    (
        "all that was recomputed stays",
        "storages",
        "        if self.held_bytes <= allowed:\n            return\n",
        "        return\n",
        "rematerialization::what_was_recomputed_beside_the_target_is_kept_to_a_share",
    ),
    (
        "nothing is planned",
        "replay",
        "LAST_PLANNED = 5",
        "LAST_PLANNED = 99",
        "rematerialization::a_replay_runs_nothing_twice_as_long_as_memory_suffices",
    ),
    (
        "inputs are not locked while an operator waits",
        "replay",
        "            source.locks += 1\n            entered.locked += 1\n",
        "            entered.locked += 1\n",
        "hazards_process::failing_operators_leave_no_locks "
        "rematerialization::a_replay_runs_nothing_twice_as_long_as_memory_suffices",
    ),
    (
        "a stolen version is released before its successor is back",
        "replay",
        "        self.ledger.policy.discard(source)\n        return storage\n",
        "        self.ledger.policy.discard(source)\n        self.ledger.policy.released(source)\n"
        "        return storage\n",
        "rematerialization::a_stolen_version_is_released_once_its_successor_is_back",
    ),
)
