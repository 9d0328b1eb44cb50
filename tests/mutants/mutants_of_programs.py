"""What programs do besides: compile, collectives, threads, forks, long chains, errors, thrashing."""

from mutant import row

row(
    "torch.compile",
    (
        "nothing is said",
        "session",
        "            compiler.CompileNotice(self._warn_once_a_run),\n",
        "",
        "hazards_process::compile_says_once_that_nothing_is_compiled",
    ),
)
row(
    "opaque operators",
    (
        "the workspace is not told from the results",
        "operators",
        "self.opaque_output = _OPAQUE_OUTPUT.get(name, -1)",
        "self.opaque_output = -1",
        "hazards_layers::lstm_inference_uses_one_opaque_operator",
    ),
)
row(
    "operators that are not replayed",
    (
        "collectives are replayed",
        "operators",
        "            self.collective or name in",
        "            name in",
        "hazards_reducers::collectives_run_once",
    ),
    (
        "what is in the table is replayed",
        "operators",
        "name in _UNREPLAYABLE or namespace",
        "namespace",
        "hazards_escapes::composite_operators_that_read_lengths",
    ),
)
row(
    "DDP and FSDP",
    (
        "a reducer's buckets are evicted",
        "reducers",
        '"__init__", "_rebuild_buckets"',
        "",
        "hazards_reducers::a_reducers_buckets_stay",
    ),
)
row(
    "threads",
    (
        "room is promised to several at once",
        "calls",
        "self.ledger.promised[id(call)] = threading.get_ident(), call.signature.output_bytes\n",
        "self.ledger.promised[id(call)] = threading.get_ident(), 0\n",
        "hazards_room::what_one_has_been_promised_is_not_anothers_room",
    ),
    (
        "nobody waits for others",
        "calls",
        "        return self._ended.wait(PATIENCE_SECONDS)\n",
        "        return False\n",
        "hazards_room::who_finds_no_room_waits_for_the_others",
    ),
    (
        "threads run without the mode",
        "threads",
        "        modes.put_under(guest)\n",
        "        pass\n",
        "hazards_threads::threads_train_in_one_session "
        "hazards_threads::a_tensor_made_in_one_thread_is_used_in_another",
    ),
    (
        "threads take the short cut",
        "threads",
        "            self._threads.noticed()\n",
        "            pass\n",
        "hazards_threads::from_a_threads_first_operator_on_the_short_cut_is_not_taken",
    ),
    (
        "threads do not wait for the short cut",
        "threads",
        "        if frame.f_code is short_cut:\n",
        "        if frame.f_code is None:\n",
        "hazards_threads::a_thread_waits_until_the_short_cut_is_left",
    ),
)
row(
    "fork",
    (
        "the session goes on in a forked child",
        "fork",
        "    if _callbacks is not None:\n",
        "    if False:\n",
        "hazards_threads::forked_child_has_every_tensor",
    ),
)
row(
    "long chains",
    (
        "the history of a loop is never cut",
        "history",
        "        self.forget_small(age)\n        self.cut_history()\n",
        "        self.forget_small(age)\n",
        "hazards_loops::the_records_of_a_loop_without_gradients_do_not_pile_up",
    ),
    (
        "what is evicted at a step's end keeps all history",
        "history",
        "(record.resident or self._restored(record)):",
        "record.resident:",
        "hazards_loops::what_is_carried_over_comes_back_before_its_history_goes",
    ),
    (
        "a program without an optimizer has no steps",
        "backwards",
        "            self._ended()\n",
        "            pass\n",
        "hazards_loops::what_is_carried_over_comes_back_before_its_history_goes",
    ),
    (
        "what a replay needed on the way stays",
        "replay",
        "                self.ledger.drop(source)\n                self.ledger.policy.released(source)\n",
        "                pass\n",
        "rematerialization::what_only_one_recipe_reads_goes_at_once",
    ),
    (
        "a chain of recipes is searched by recursion",
        "recipes",
        "        if record.op is None:\n            return False\n",
        "        if record.op is None:\n            return False\n"
        "        [self.secure(s) for s in record.op.inputs if s.op is not None and not s.op.secured]\n",
        "faults_chains::read_from_the_end",
    ),
)
row(
    "failing operators",
    (
        "locks are not released",
        "outcomes",
        '        """The operator raised: the user sees its own error."""\n        self._unlock(call)\n',
        "",
        "hazards_process::failing_operators_leave_no_locks",
    ),
    (
        "a half-written storage keeps its recipe",
        "writes",
        "        if current is not None:\n",
        "        if False:\n",
        "hazards_mutation::mutation_that_fails_half_way",
    ),
    (
        "the short cut does not see that an operator raised",
        "mode",
        "                ledger.half_written(target)\n",
        "                pass\n",
        "hazards_mutation::mutation_that_fails_half_way",
    ),
)
row(
    "thrashing",
    (
        "a step that is mostly recomputation goes unnoticed",
        "session",
        "        self._thrashing.watch(self.steps.last)\n",
        "",
        "hazards_process::thrashing_is_said_once_and_can_stop",
    ),
)
