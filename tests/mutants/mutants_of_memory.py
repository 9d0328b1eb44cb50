"""Ways to memory that are no plain operator: escapes, native code, foreign memory, layouts, set_."""

from mutant import row

row(
    "escapes",
    (
        "reads are not seen",
        "escapes",
        "        for name in READS:\n",
        "        for name in ():\n",
        "hazards_escapes::reads",
    ),
    (
        "writes are not seen",
        "escapes",
        "        for name in WRITES:\n",
        "        for name in ():\n",
        "hazards_escapes::writes",
    ),
    (
        "memory is handed out unseen",
        "escapes",
        "        for name in EXPOSES:\n",
        "        for name in ():\n",
        "hazards_escapes::arrays_stay_valid_and_are_written_to_later",
    ),
    (
        "what is saved or copied counts as handed out",
        "escapes",
        "                if takes_storage and (ends := until_return()) is not None:\n",
        "                if False:\n",
        "hazards_saving::what_was_saved_can_be_evicted_afterwards",
    ),
    (
        "what is read from an address is evicted meanwhile",
        "access",
        "                    self._keep(tensor)\n",
        "                    pass\n",
        "hazards_saving::what_a_reader_was_handed_stays_where_it_is",
    ),
    (
        "every module may read from addresses",
        "passing",
        'frame.f_globals.get("__name__") in READERS',
        "True",
        "hazards_saving::other_modules_are_handed_memory_for_good",
    ),
    (
        "what was loaded is evicted once it is overwritten",
        "outcomes",
        'given.exposed, given.pin = False, "loaded or copied"',
        'given.exposed, given.pin = False, "constant"',
        "hazards_saving::memory_that_was_loaded_cannot_be_given_back",
    ),
    (
        "what is handed out is not marked so",
        "writes",
        "        record.exposed = record.exposed or exposes ",
        "        pass ",
        "hazards_escapes::arrays_stay_valid_and_are_written_to_later",
    ),
    (
        "what is handed out is marked in its old version",
        "recipes",
        "        version.exposed = record.exposed\n",
        "",
        "hazards_escapes::what_an_operator_has_read_before_it_is_handed_out",
    ),
    (
        "nothing is rescued before a write outside",
        "writes",
        "record, why)\n            self.before_mutation(record)\n",
        "record, why)\n",
        "hazards_escapes::writes hazards_escapes::arrays_stay_valid_and_are_written_to_later",
    ),
    (
        "composite operators read lengths that are evicted",
        "composites",
        "        for func in _named(READ_INTEGERS):\n",
        "        for func in ():\n",
        "hazards_lengths::packed_sequences_whose_lengths_were_evicted "
        "hazards_lengths::split_points_that_were_evicted",
    ),
    (
        "constructors read evicted elements",
        "escapes",
        "        for name in NUMBERS:\n",
        "        for name in ():\n",
        "hazards_escapes::reads surface::evicted_tensors_in_lists",
    ),
    (
        "an escape's replay runs under the program's modes",
        "replay",
        "        guard: below = self.guard()\n",
        "        guard: Any = torch.no_grad()\n",
        "hazards_modes::autocast_in_and_out",
    ),
)
row(
    "native extensions",
    (
        "a custom forward's inputs are not locked",
        "functions",
        "            unlock = lock([arg for arg in args if isinstance(arg, torch.Tensor)])\n",
        "            unlock = lock([])\n",
        "hazards_functions::tensors_of_a_custom_function_stay_in_memory_while_it_runs",
    ),
    (
        "a custom backward's gradients are not locked",
        "functions",
        "            frames.unlocks = [lock([arg for arg in args if isinstance(arg, torch.Tensor)])]\n",
        "            frames.unlocks = []\n",
        "hazards_functions::tensors_of_a_custom_function_stay_in_memory_while_it_runs",
    ),
    (
        "a custom backward's saved tensors are not locked",
        "functions",
        "            if unlocks is not None:\n",
        "            if False:\n",
        "hazards_functions::tensors_of_a_custom_function_stay_in_memory_while_it_runs",
    ),
)
row(
    "storages that are not ours",
    (
        "foreign memory is taken for ours",
        "storages",
        "        elif not self.memory.is_ours(storage):\n",
        "        elif False:\n",
        "hazards_escapes::memory_that_is_not_ours "
        "faults_numpy::arrays_under_tensors_change_between_operators",
    ),
)
row(
    "several outputs",
    (
        "every output is the first one",
        "replay",
        "targets[~where] if where < 0 else memory.storage_of(results[where])",
        "targets[~where] if where < 0 else memory.storage_of(results[0])",
        "hazards_values::several_outputs_of_which_some_are_dropped",
    ),
    (
        "an output that is there is replaced",
        "replay",
        "                if record is None or record.resident:\n",
        "                if record is None:\n",
        "rematerialization::outputs_that_are_there_are_left_alone",
    ),
)
row(
    "other layouts and subclasses",
    (
        "quantized results are taken for plain ones",
        "outcomes",
        "    odd: bool = tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor()\n",
        "    odd = False\n",
        "hazards_layouts::sparse_and_quantized hazards_layouts::nested_tensors",
    ),
    (
        "subclasses are not unwrapped",
        "careful",
        "                return NotImplemented  # a subclass",
        "                pass  # a subclass",
        "hazards_layouts::tensor_subclasses",
    ),
    (
        "what a sparse tensor is made from stays evictable",
        "outcomes",
        "                for record in call.records:\n"
        '                    ledger.expose(record, "shared with a tensor without plain storage")\n',
        "                pass\n",
        "hazards_layouts::sparse_and_quantized",
    ),
    (
        "conjugate views older than the session take the short cut",
        "calls",
        "        if call.complex:\n",
        "        if False:\n",
        "hazards_layouts::conjugate_made_before_the_session",
    ),
)
row(
    "what PyTorch does otherwise under a mode",
    (
        "gradient formulas see our mode",
        "careful",
        "        if operator.checks_modes:\n",
        "        if False:\n",
        "hazards_mode_checks::gradient_formulas_that_ask_for_modes",
    ),
    (
        "what such a formula reads may be evicted",
        "mode_checks",
        "tensors = [*saved_by(node), *_tensors(gradients)]",
        "tensors = []",
        "hazards_mode_checks::gradient_formulas_that_ask_for_modes",
    ),
    (
        "unpack hooks are asked what such a node has saved",
        "unpacking",
        "                raise Hooked\n",
        "                pass\n",
        "hazards_saved::hooks_where_pytorch_does_not_tell_of_them",
    ),
    (
        "unpack hooks run where nobody sees their operators",
        "mode_checks",
        "            return formulas[-1].unpack(hook, packed)\n",
        "            pass\n",
        "hazards_saved::hooks_run_once_and_find_what_they_read",
    ),
    (
        "the program's hooks on such a node run without our mode",
        "mode_checks",
        "        _move_to_front(last)\n",
        "",
        "hazards_saved::hooks_about_such_a_node_that_read_what_is_evicted",
    ),
    (
        "functions with out= see our mode",
        "composites",
        "            if (graph and not is_written) or not only_our_mode():\n",
        "            if True:\n",
        "hazards_mode_checks::out_of_composites_that_ask_for_modes",
    ),
    (
        "kernels find conjugates unresolved",
        "careful",
        "            elif call.complex or call.autocast:\n",
        "            elif False:\n",
        "hazards_mode_checks::conjugates_that_kernels_make_inside",
    ),
    (
        "small constants go at once",
        "storages",
        'elif pin == "constant" and 0 < record.nbytes',
        "elif False and 0 < record.nbytes",
        "hazards_mode_checks::what_was_made_from_a_small_constant_can_be_evicted",
    ),
)
row(
    ".data, set_, swap_tensors",
    (
        "set_ and resize_ are ordinary mutations",
        "operators",
        "self.reshapes_storage = name in _RESHAPES_STORAGE",
        "self.reshapes_storage = False",
        "hazards_mutation::resize_set_data_and_swap",
    ),
    (
        "a storage is looked up by its tensor",
        "calls",
        "            return None\n        record = self.ledger.records.get(id(storage))\n",
        "            return None\n"
        "        storage = self.__dict__.setdefault('s', {}).setdefault(id(tensor), storage)\n"
        "        record = self.ledger.records.get(id(storage))\n",
        "hazards_mutation::resize_set_data_and_swap",
    ),
)
