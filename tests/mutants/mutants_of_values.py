"""Which bits a storage has: versions, constants, gradients, random numbers, uninitialised memory, views."""

from mutant import row

row(
    "in-place operators",
    (
        "the short cut gives a mutation no version",
        "mode",
        "op.outputs = ((~0, weakref.ref(ledger.supersede(target, op, signature.cost))),)\n",
        "pass\n",
        "hazards_mutation::chain_of_mutations_whose_old_versions_are_needed",
    ),
    (
        "the careful way gives a mutation no version",
        "outcomes",
        "            if op is not None:\n                record = ",
        "            if False:\n                record = ",
        "hazards_mutation::foreach_operators hazards_mutation::out_arguments",
    ),
    (
        "a replayed mutation writes into the old version",
        "replay",
        "self._take(entry) if take else self._copy(entry)",
        "self._take(entry) if take else entry.memory()",
        "hazards_mutation::chain_of_mutations_whose_old_versions_are_needed",
    ),
    (
        "an old version still owns the storage",
        "recipes",
        "        record.superseded = True\n        record.resident = False\n",
        "",
        "hazards_mutation::chain_of_mutations_whose_old_versions_are_needed",
    ),
    (
        "lists: what relies on the old values is not rescued",
        "lists",
        "        if record.secured_by is not None:\n            return False\n",
        "",
        "hazards_lists::what_was_computed_from_the_old_values_is_rescued",
    ),
    (
        "lists: they get no version",
        "lists",
        "                ledger.supersede(record, None, 0)\n    except",
        "                pass\n    except",
        "hazards_lists::recipes_name_the_version_that_they_read",
    ),
    (
        "lists: inputs are not brought back",
        "lists",
        "        if not record.resident:\n            return False\n",
        "",
        "hazards_lists::evicted_inputs_come_back",
    ),
    (
        "lists: autograd is not told",
        "lists",
        "            count_write(unseen)\n",
        "            pass\n",
        "hazards_lists::autograd_sees_the_writes",
    ),
    (
        "lists: new state keeps its recipe",
        "lists",
        '        ledger.make_constant(record, "updated in place")\n',
        "        pass\n",
        "hazards_lists::new_state_among_old",
    ),
    (
        "lists: complex numbers are taken for others",
        "calls",
        "call.opaque or call.complex or ",
        "call.opaque or ",
        "hazards_lists::complex_numbers_are_not_taken_for_as_many_bytes_of_others",
    ),
)
row(
    "mutated constants",
    (
        "nothing is rescued before a constant changes",
        "recipes",
        "        if record.secured_by is None:\n            return\n",
        "        return\n",
        "hazards_mutation::weights_change_while_what_they_made_is_evicted",
    ),
    (
        "the short cut mutates constants that something is secured by",
        "mode",
        "                if target.secured_by is not None:\n",
        "                if False:\n",
        "hazards_constants::mutation_of_a_buffer_on_the_short_cut",
    ),
    (
        "the short cut's mutated constant has no new version",
        "mode",
        "                    ledger.supersede(target, None, 0)\n",
        "                    pass\n",
        "hazards_constants::mutation_of_a_buffer_on_the_short_cut",
    ),
    (
        "the careful way's mutated constant has no new version",
        "outcomes",
        "            elif record.used:\n                record = ledger.supersede",
        "            elif False:\n                record = ledger.supersede",
        "hazards_mutation::weights_change_while_what_they_made_is_evicted "
        "hazards_mutation::input_mutated_by_the_program_after_its_use",
    ),
    (
        "only what is evicted is rescued",
        "recipes",
        '                    self.make_constant(node, "input mutated")\n                elif',
        "                    pass\n                elif",
        "hazards_mutation::weights_change_while_what_they_made_is_evicted "
        "hazards_gradients::maml_inner_steps_by_functional_call",
    ),
    (
        "history is never forgotten",
        "history",
        "        self.forget_history()\n",
        "",
        "hazards_mutation::kept_losses_do_not_pile_up_records",
    ),
    (
        "recipes do not hold on to their constants",
        "recipes",
        "                op.held = tuple(held)\n",
        "                op.held = ()\n",
        "hazards_constants::constants_that_the_program_releases",
    ),
    (
        "a released constant counts as there",
        "recipes",
        "if content is None or source.pin",
        "if source.pin",
        "hazards_mutation::weights_change_while_what_they_made_is_evicted hazards_modes::autocast_in_and_out",
    ),
)
row(
    "gradients",
    (
        "those that no leaf accumulates may be evicted",
        "backwards",
        '        self._pin(gradient, "gradient")\n',
        "        pass\n",
        "hazards_loops::inside_a_budget_a_step_is_recomputed_and_not_the_program",
    ),
    (
        "a replay holds on to them",
        "recipes",
        ' or source.pin == "gradient"',
        "",
        "hazards_loops::inside_a_budget_a_step_is_recomputed_and_not_the_program",
    ),
    (
        "gradients are not pinned",
        "gradients",
        "        if gradient is not None:\n",
        "        if False:\n",
        "hazards_gradients::gradients_stay_in_memory",
    ),
)
row(
    "schemas that lie",
    (
        "batch norm is believed",
        "operators",
        '_STATISTICS.get(name) if func._overloadname == "default" else None',
        "None",
        "hazards_functions::running_statistics_are_updated_once",
    ),
    (
        "a replay updates the running statistics again",
        "mutation",
        "        if rule is None or not holes:\n            return\n",
        "        return\n",
        "hazards_functions::running_statistics_are_updated_once",
    ),
    (
        "running statistics have no later version",
        "mutation",
        "            if rule.updates and call.records[hole].used:\n",
        "            if False:\n",
        "hazards_constants::what_statistics_made_is_evicted_after_their_update",
    ),
    (
        "what running statistics made is not rescued",
        "careful",
        "            ledger.about_to_change(statistics, call.changing)\n",
        "            pass\n",
        "hazards_constants::statistics_are_read_before_they_are_updated",
    ),
)
row(
    "randomness",
    (
        "generators are found by name alone",
        "operators",
        "        given = kwargs.get(name, args[position] if position < len(args) else None)\n",
        "        given = kwargs.get(name)\n",
        "hazards_draws::a_generator_that_is_given",
    ),
    (
        "what is not PyTorch's draws nothing unless it says so",
        "operators",
        "        self.foreign = namespace not in _OWN_NAMESPACES\n",
        "        self.foreign = False\n",
        "hazards_draws::an_operator_that_is_not_pytorchs",
    ),
    (
        "a shape function's draws count",
        "shapes",
        "            with unmoved() if operator.foreign else nullcontext():\n",
        "            with nullcontext():\n",
        "hazards_draws::an_operator_that_is_not_pytorchs",
    ),
    (
        "a shared state is not moved on",
        "rng",
        "        if self.blocks:\n",
        "        if False:\n",
        "hazards_draws::draws_that_share_a_state_come_back",
    ),
    (
        "a replay draws anew",
        "replay",
        "replaying(op.rng) if op.rng else nullcontext(),\n",
        "nullcontext(),\n",
        "hazards_values::random_operators_and_their_generators",
    ),
    (
        "a replay moves the program's generator",
        "rng",
        "                generator.set_state(state)\n",
        "                pass\n",
        "hazards_values::rematerialization_leaves_the_generator_where_the_program_put_it",
    ),
)
row(
    "uninitialised memory",
    (
        "empty has a recipe",
        "operators",
        "self.uninitialised = name in _UNINITIALISED",
        "self.uninitialised = False",
        "hazards_mutation::uninitialised_memory_becomes_replayable_when_it_is_overwritten",
    ),
    (
        "an overwrite makes nothing replayable",
        "operators",
        "self.overwrites = name in _OVERWRITES or (",
        "self.overwrites = False and (",
        "hazards_mutation::uninitialised_memory_becomes_replayable_when_it_is_overwritten",
    ),
    (
        "a part is taken for the whole",
        "mutation",
        "        and covers(call.tensors[holes[0]])\n",
        "",
        "hazards_mutation::uninitialised_memory_becomes_replayable_when_it_is_overwritten "
        "hazards_mutation::mutation_through_views hazards_mutation::out_arguments",
    ),
)
row(
    "views by identity",
    (
        "the short cut takes every result for new memory",
        "mode",
        "            if place not in records:\n",
        "            if True:\n",
        "hazards_values::views_that_may_be_their_input",
    ),
    (
        "the careful way does",
        "outcomes",
        "            if id(storage) in ledger.records:\n                continue",
        "            if False:\n                continue",
        "hazards_values::views_that_may_be_their_input",
    ),
)
