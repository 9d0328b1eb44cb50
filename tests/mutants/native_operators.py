"""Native mutants of what becomes of an operator: its signature, its recipe, its results, its turn."""

from __future__ import annotations

from native import native

# Of each: what goes wrong, the code with the piece that is replaced, what is put in its place, who notices.
# fmt: off

native(
    "making ready", "core/operator.h",
    ("inputs stay locked", "call.locked = false; for (Version* one : call.versions) «one->locks--;»", "",
     "hazards_process::failing_operators_leave_no_locks"),
    ("inputs that were brought back count as stale",
     "«one->last_access = ledger_.clock;» resident = resident", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
)
native(
    "making ready", "core/eviction.h",
    ("room is promised to several at once", "return fits(nbytes + «ledger_.reserved_bytes»);", "0",
     "hazards_room::room_that_another_has_been_promised_is_none"),
)
native(
    "making ready", "admission.h",
    ("the program is refused memory that garbage takes",
     "if («found_garbage(began)») continue;", "false",
     "garbage::a_refusal_soon_after_a_collection_that_freed_nothing_is_preceded_by_another"),
    ("nobody waits for others' room",
     "if («call.reserves && others_end()») return std::nullopt;", "false",
     "hazards_room::who_finds_no_room_waits_for_the_others"),
    ("addresses on the stack of a library are never looked for",
     "if («core_.operators.is_ready(call)») {", "true", ""),
)
native(
    "observers", "observed.h",
    ("an operator that has failed counts as one that could not run",
     "get()->state = «now ? ObservedCall::RUNNING : ObservedCall::ADMITTED»;", "ObservedCall::ADMITTED",
     "observers::an_operator_that_fails"),
    ("operators that are over are looked at",
     "«call->by = nullptr;» std::exchange(call->versions, py::object());", "",
     "observers::nothing_is_told_of_an_operator_that_is_over"),
    ("what operators write to is not told", "return «info->writes_to(place)»; });", "false",
     "predictions::a_step_alone_is_predicted_as_if_the_budget_began_with_it[in_place_and_dropout]"),
    ("where tensors are in their storages is not told",
     "return «info->handler == HandlerKind::PLAIN ? info->makes_tensors "
     ": info->handler != HandlerKind::LISTS»;",
     "true",
     "predictions::what_runs_without_care_is_logged_as_with_it[operators_of_many_kinds]"),
    ("running statistics are not told", "return «trains» && std::find", "false",
     "predictions::what_leaves_for_the_host_is_predicted[in_place_and_dropout]"),
)
native(
    "deaths", "core/ledger.h",
    ("observers are not told", "«backend.died(one);»", "",
     "predictions::what_runs_without_care_is_logged_as_with_it[plain_mlp]"),
)
native(
    "operators", "core/operator.h",
    ("a mutation gets no version",
     "«version = recipes_.supersede(version.get(), operation, call.cost);»", "",
     "hazards_mutation::foreach_operators hazards_mutation::out_arguments"),
    ("a mutated constant has no new version", "} else if («version->used && !version->away») {", "false",
     "hazards_mutation::weights_change_while_what_they_made_is_evicted "
     "hazards_constants::mutation_of_a_buffer_on_the_short_cut"),
    ("running statistics get no later version",
     "if («call.updates_statistics») for (size_t hole : call.statistics) if (call.versions[hole]->used",
     "false", "hazards_constants::what_statistics_made_is_evicted_after_their_update"),
    ("what running statistics made is not rescued",
     "if («call.updates_statistics») prepare_statistics(call);", "false",
     "hazards_constants::statistics_are_read_before_they_are_updated "
     "hazards_constants::what_statistics_made_outlives_an_update"),
    ("what a sparse tensor is made from stays evictable", "if («!plain && !call.view») {", "false",
     "hazards_layouts::sparse_and_quantized"),
    ("small constants go at once", "«backend.keep_small(storage);»", "",
     "hazards_constants::what_was_made_from_a_small_constant_can_be_evicted"),
    ("what recipes read is not known to be used",
     "for (Node* read : operation) «as_version(read)->used = true;»", "",
     "hazards_lists::recipes_name_the_version_that_they_read"),
    ("nothing is evicted for what is larger than foreseen",
     "if («ledger_.resident_bytes > ledger_.limit» && call.shrinks", "false",
     "native_first_calls::what_is_larger_than_a_formula_says_is_corrected_and_made_room_for"),
    ("the clock stands still", "if (!call.view) «ledger_.clock += call.cost;» //", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("results of an operator that has several are all the first one's",
     "version = enter(output.storage, operation); where = «output.where»;", "int64_t{0}",
     "hazards_values::several_outputs_of_which_some_are_dropped"),
    ("what has grown counts as before",
     "call.resized(write.hole, version.get())) «ledger_.backend.resized(version.get(), *nbytes);» // The",
     "", "hazards_sizes::an_operator_in_place_enlarges_what_it_writes_to"),
)
native(
    "failing operators", "core/operator.h",
    ("locks are not released", "void fail(C& call) { bool reserved = «unlock(call)»;", "false",
     "hazards_process::failing_operators_leave_no_locks"),
    ("what was half written keeps its recipe", "VersionRef version = «recipes_.half_written(write.target)»;",
     "VersionRef()", "hazards_mutation::mutation_that_fails_half_way"),
)
native(
    "operators", "core/version.h",
    ("a guess is not corrected", "«if (nbytes > output_bytes || lower) output_bytes = nbytes;»", "",
     "native_first_calls::what_is_larger_than_a_formula_says_is_corrected_and_made_room_for"),
)
native(
    "operators", "interposer.h",
    ("looking at a view is no use of its storage",
     "«found->last_access = ledger.clock;» int64_t started = watch", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("gradients may be evicted", "«core_.recipes.make_constant(found, pins::GRADIENT);»", "",
     "hazards_gradients::gradients_stay_in_memory"),
    ("nothing of what is evicted makes a view wait",
     "if (found == nullptr || !(«found->resident» || info.untouching)) return false; found->last_access",
     "true",
     "rematerialization::a_view_is_a_use_of_what_it_shows_unless_it_is_for_autograd_alone"),
)
native(
    "operators", "typed_kernels.h",
    ("a caller's tensors are let go of", "((places < built_ && !«is_borrowed<Args>» ?", "false",
     "typed_kernels::a_kernel_for_each_type_computes_the_same_bits"),
    ("what is handled in Python returns nothing new",
     "result_.emplace(«unboxed(std::move(results), static_cast<Result*>(nullptr))»);", "Result()",
     "typed_kernels::a_kernel_that_the_program_has_replaced_returns_its_results"),
    ("the second result comes first", "size_t place = «0»;", "1",
     "typed_kernels::a_kernel_that_the_program_has_replaced_returns_its_results"),
    ("lists of numbers are only as long as each other",
     "|| «!std::equal(numbers.begin(), numbers.end(), one.numbers_)») {", "false",
     "typed_kernels::lists_of_numbers_are_not_taken_for_each_other"),
    ("types that look alike have the first one's kernel",
     "found != last; «++found») {", "found = last",
     "typed_kernels::each_example_arrives_by_a_kernel"),
)
native(
    "operators", "operator_call.h",
    ("a part is taken for the whole",
     "return «tensor.nbytes() == tensor.storage().nbytes()» && tensor.is_non_overlapping", "true",
     "interposer::what_is_overwritten_stays_out_of_python"),
    ("what is transposed is no whole",
     "== tensor.storage().nbytes() && «tensor.is_non_overlapping_and_dense()»;", "tensor.is_contiguous()",
     "interposer::what_is_overwritten_stays_out_of_python"),
    ("what is overwritten is not read beside it", "&& «times() == 1»;", "true",
     "interposer::what_is_overwritten_stays_out_of_python"),
    ("what is read twice is locked twice", "if («is_new(version)») add_read", "true",
     "interposer::what_is_overwritten_stays_out_of_python"),
    ("uninitialised memory has a recipe", "replayable = «info.replayable»;", "true",
     "hazards_mutation::uninitialised_memory_becomes_replayable_when_it_is_overwritten"),
)
native(
    "operators", "describe.h",
    ("a leaf that changes is no parameter", "bool leaf = «is_leaf(tensor)»;", "false",
     "decisions/decisions::a_block_of_the_sample[7]"),
)
native(
    "operators", "core/mutation.h",
    ("parameters that are overwritten are no constants any more",
     "return version->constant() ? «!is_sticky(version->pin)» && overwrites()", "true",
     ""),
)
native(
    "operators", "record.h",
    ("a replay updates the running statistics again",
     "if («call.holes[place] == VALUE») recipe->values()",
     "call.holes[place] == VALUE || call.holes[place] == STATISTICS",
     "hazards_constants::a_replay_updates_no_statistics"),
    ("the state of generators is not captured",
     "bool draws = «(info.random || info.foreign)» && !is_captured", "false",
     "hazards_values::random_operators_and_their_generators"),
    ("what a given generator draws counts as drawn from the default one",
     "if («call.argument(place).isGenerator()» &&", "false",
     "interposer::draws_from_a_generator_stay_out_of_python"),
)
native(
    "views by identity", "record.h",
    ("every result is taken for new memory",
     "bool is_known = «versions_.at(as_impl(storage)) != nullptr» ||", "false", ""),
)
native(
    "threads", "interposer.h",
    ("who has waited does not look again",
     "bool careful = «is_careful()»; if (careful && have_changed(call)) return false;", "false",
     "hazards_threads::who_has_waited_for_a_turn_looks_again_whether_care_is_needed "
     "program_code::what_a_replay_reads_is_not_written_to_meanwhile"),
    ("every thread takes no lock from its first operator",
     "if («shared_ || is_home()») return; thread_local", "true",
     "hazards_threads::from_a_threads_first_operator_on_the_short_cut_is_not_taken"),
    ("nobody sees that a thread is in an operator",
     "if («is_alone_») interposer.inside_ = PyThread_get_thread_ident();", "false", ""),
    ("who comes back takes no lock", "if («others || shared_») {", "false",
     "program_code::a_replay_waits_for_a_thread_that_is_the_first_to_join"),
)
native(
    "threads", "core/operator.h",
    ("what another thread uses is written to", "if («target->locks != 0») mutation_.escape", "false",
     "hazards_room::what_another_thread_uses_stays_when_it_is_written_to"),
)
native(
    "threads", "operator_call.h",
    ("no room is reserved while others have their turns", "reserves = «turn.shared()»;", "false",
     "hazards_room::a_kernel_keeps_its_room_and_tells_when_it_has_ended"),
)
native(
    "threads", "run_kernel.h",
    ("others read what is half written", "may_go_on_(call.turn.shared() && «call.written.empty()» &&", "true",
     "hazards_threads::what_is_half_written_is_not_read_by_a_replay_of_another_thread"),
    ("others draw while an operator does", "&& «!call.info.random»)", "true",
     "hazards_threads::nobody_else_has_a_turn_while_an_operator_draws"),
)
native(
    "threads", "backend.h",
    ("nobody is told that room has come back",
     "if («!native_ || native_->waiting.number(native_->callbacks) != 0») PythonBackend::", "false",
     "hazards_room::a_kernel_keeps_its_room_and_tells_when_it_has_ended"),
)
native(
    "signatures", "describe.h",
    ("the default dtype is no part of a signature",
     "key_.add(«static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype()))» |",
     "uint64_t{0}", "hazards_sizes::how_much_numbers_take_depends_on_the_default_dtype"),
    ("numbers that decide on sizes are no part of it",
     "} else if («info.sized_by_numbers» && value.isDouble()) {", "false",
     "hazards_sizes::how_long_a_range_is_depends_on_numbers"),
    ("where a tensor begins is no part of it",
     "offsets_matter_ = «info.makes_tensors || info.handler != HandlerKind::PLAIN»;", "info.makes_tensors",
     "hazards_lists::lists_of_parts_are_written_to_again_where_they_were"),
)
native(
    "signatures", "signatures.h",
    ("strides are no part of it",
     "for (int64_t stride : strides) *next++ = «static_cast<uint64_t>(stride)»;", "uint64_t{0}",
     "programs/programs::random_programs"),
    ("sizes are no part of it",
     "for (int64_t size : sizes) *next++ = «static_cast<uint64_t>(size)»;", "uint64_t{0}",
     "hazards_layouts::geometries_and_types"),
    ("types are no part of it",
     "TENSOR | «static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype()))» << 8", "uint64_t{0}",
     "hazards_layouts::calls_that_differ_only_in_where_a_tensor_begins_or_in_its_type"),
    ("whole numbers are no part of it", "add(«static_cast<uint64_t>(value.toInt())»);", "uint64_t{0}",
     "native_first_calls::what_first_calls_allocate_is_known_before[drawn-1GB]"),
    ("lists of whole numbers are no part of it",
     "for (const IValue& number : list) add(«static_cast<uint64_t>(number.toInt())»);", "uint64_t{0}",
     "decisions/decisions::a_block_of_the_sample[7]"),
)
native(
    "lists", "lists.h",
    ("what lists write to gets no version",
     "«core_.recipes.supersede(target.get(), nullptr, 0);» forget();", "",
     "hazards_lists::recipes_name_the_version_that_they_read"),
    ("what relies on the old values is not rescued",
     "if (!«core_.rescue.resident_dependents_of(target.get())») return false;", "true",
     "hazards_lists::what_was_computed_from_the_old_values_is_rescued"),
    ("inputs of lists are not brought back",
     "if («!one->resident») return false; one->last_access", "false",
     "hazards_lists::evicted_inputs_come_back"),
    ("new state keeps its recipe",
     "for (Version* one : loose_) «core_.recipes.make_constant(one, pins::UPDATED_IN_PLACE);»", "",
     "hazards_lists::new_state_among_old"),
    ("lists that are half written keep their recipes",
     "«core_.recipes.half_written(target.get());»", "",
     "hazards_lists::what_was_made_before_an_operator_failed_half_way"),
    ("what lists make needs no room",
     "if («made != 0 && ledger.resident_bytes + made > ledger.limit») return false;", "false", ""),
    ("which weights are worth a copy is not asked",
     "if («may_be_copied(target)») return false;", "false", ""),
)
native(
    "first calls", "formulas.h",
    ("all elements take a byte", "«(*numels)[i] *= itemsizes->second[i];»", "",
     "unit/formulas::as_the_shape_function_and_as_pytorch"),
    ("a formula that does not fit is used again",
     "«info.formula = Formula::UNKNOWN;» //", "",
     "native_first_calls::a_formula_that_does_not_fit_is_not_used_again"),
    ("room is made for what no memory holds",
     "if («(*numels)[i] < 0 || (*numels)[i] >= MANY») return std::nullopt;", "false",
     "native_first_calls::what_no_memory_holds_is_an_error_of_pytorchs"),
    ("numbers promote like tensors", "uint64_t weak = «tensor.dim() == 0»;", "false",
     "hazards_sizes::a_tensor_without_dimensions_decides_less_on_a_type"),
    ("what is broadcast is as large as its first operand", "«all[place] = own;»", "",
     "native_first_calls::what_first_calls_allocate_is_known_before[broadcast-1GB]"),
)
native(
    "first calls", "first_calls.h",
    ("what the model says of a first call is not asked",
     "if («!prices_») return std::nullopt;", "true",
     "native_first_calls::what_first_calls_allocate_is_known_before[drawn-1GB]"),
    ("first calls are no guesses", "one->figures.guessed = «info.makes_tensors»;", "false", ""),
    ("no formula learns from a first call",
     "if (!nbytes && is_usual) «lesson = formulas_.lesson_of(info, call.values, call.count);»", "",
     "unit/formulas::what_teaches_nothing"),
)
