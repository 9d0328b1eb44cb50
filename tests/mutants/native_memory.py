"""Native mutants of what is evicted, kept and counted."""

from __future__ import annotations

from native import native

AHEAD = "gpu/host_tier::copies_ahead[False] gpu/host_tier::copies_ahead[True]"
CHANGES = "gpu/host_tier::what_is_copied_ahead_may_change_or_go"
RESULTS = "gpu/host_tier::results_that_are_copied_ahead"
OUT = "gpu/host_tier::copies_out_for_another_stream"
CURRENT = "c10::impl::VirtualGuardImpl(home().device_type()).getStream(home().device())"

# Of each: what goes wrong, the code with the piece that is replaced, what is put in its place, who notices.
# fmt: off

native(
    "eviction", "core/eviction.h",
    ("what is locked may be evicted",
     "if («one->locks != 0 || !one->resident || one->constant()» || one->device", "false",
     "programs/programs::random_programs"),
    ("what is on another device is evicted", "|| «one->device != ledger_.device») return false;", "false",
     "unit/simulator_live::each_device_has_a_budget_of_its_own"),
    ("what has just died may be evicted", "«return ledger_.backend.has_storage(one);»", "return true;", ""),
    ("with a budget that cannot be kept, what was just recomputed is evicted",
     "if (one->scratch) return «!(goes_over() && ledger_.replaying != 0)»;", "true", ""),
    ("nothing is secured before its eviction",
     "if («recipes_.secure(victim.get())») { // otherwise it is a constant now expel(", "true",
     "hazards_mutation::weights_change_while_what_they_made_is_evicted"),
    ("there is always room", "return «ledger_.resident_bytes + nbytes <= ledger_.limit»;", "true",
     "rematerialization::known_operators_keep_to_the_budget"),
    ("what others have been promised counts as room",
     "«nbytes += ledger_.reserved_bytes;» if (fits(nbytes)) return true;", "",
     "hazards_room::what_one_has_been_promised_is_not_anothers_room"),
    ("no garbage is looked for where nothing is left to evict",
     "before = ledger_.unlocks; most < 0 || «!ledger_.backend.collect_garbage()») {", "true", ""),
)
native(
    "the host tier", "core/eviction.h",
    ("what other code can reach leaves for the host",
     "!one->resident || «one->escaped || one->fixed || one->away» ||", "false",
     "host::memory_that_other_code_can_reach_stays"),
    ("a pin does not keep a constant from leaving",
     "return «stay.count(one->pin) == 0» && ledger_.backend.has_storage(one);", "true",
     "host::memory_that_other_code_can_reach_stays"),
    ("a constant leaves for which there is no place",
     "if (wanted(one) && may_leave(one) && «may_take(one)») function(one);", "true", ""),
    ("constants stay, although nothing else could make room",
     "if («!ledger_.tier || most <= 0») return false; bool leave", "true", "host::optimizers[each]"),
    ("what was only counted stays", "if (adopts) «ledger_.backend.adopt_counted();»", "",
     "host::a_budget_that_is_set_once_operators_have_only_been_counted[40MB]"),
    ("copies of what is in memory make no room for others",
     "if («!one->resident || !one->host») continue; one->host.reset();", "true", "host::a_full_disk"),
    ("results are copied although recomputing them takes less",
     "«cost_of_copy(one) < ledger_.policy->projected_cost(one)»;", "true",
     "host::results_leave_where_recomputing_them_takes_longer"),
    ("no room is made for what comes back",
     "«make_room(one->nbytes, nullptr, \"a tensor that comes back from the host\");»", "",
     "host::optimizers[foreach]"),
)
native(
    "the host tier", "core/eviction.cpp",
    ("a bound keeps all constants from leaving",
     "return «bound / static_cast<double>(one->nbytes) < least»;", "least <= 0",
     "host::optimizers[each]"),
)
native(
    "the host tier", "core/mutation.h",
    ("a result on the host is brought back before its inputs change",
     "(node->resident && !node->scratch) || «node->has_left()»;", "false",
     "host::a_result_on_the_host_needs_no_inputs"),
)
native(
    "the host tier", "core/ledger.h",
    ("a copy on the host outlives the content", "«one->host.reset();» }  // Returns all versions", "",
     "host::a_copy_is_kept_until_the_content_changes"),
)
native(
    "copies between streams", "host_tier.h",
    ("a copy does not wait for what the program did before", "«ready.block(stream);»", "", AHEAD),
    ("a copy waits for another stream than the main one", "ready.record(«home()»);", CURRENT, OUT),
    ("the program does not wait for a copy", "if (event == nullptr) «await(*done);» else", "", AHEAD),
    ("the main stream does not wait for a copy", "«event.block(home());» c10::Stream current", "", AHEAD),
    ("the stream that the program is on does not wait for a copy",
     "if («current != home()») event.block(current);", "false", CHANGES),
)
native(
    "copies between streams", "core/host.h",
    ("what has been brought back ahead is used before the copy is over",
     "if (copy.brought) { «wait_for(copy, clock);»", "", RESULTS),
    ("a copy under way is not waited for when it is given up",
     "HostCopy::~HostCopy() { «tier->let_go(*this);»", "", CHANGES),
)
native(
    "copies between streams", "core/eviction.h",
    ("memory is freed before the copy that was ordered ahead is over",
     "«tier.wait_for(*one->host, ledger_.clock);» one->host->last_access", "", AHEAD),
    ("what is being copied out may be freed", "«next->host->read = std::move(storage);»", "", CHANGES),
    ("memory into which something comes back is freed before the copy is over",
     "«last->host->tier->let_go(*last->host);»", "", AHEAD),
)
native(
    "several devices", "core/ledger.h",
    ("what is counted for a version goes to the device in use",
     "before_(ledger.device) { «ledger.use(device);» }", "",
     "unit/simulator_live::each_device_has_a_budget_of_its_own"),
    ("a new device has no limit", "if (budget_bytes >= 0) «others_.back().limit = budget_bytes;»", "",
     "unit/simulator_live::each_device_has_a_budget_of_its_own"),
)
native(
    "recipes", "core/recipes.h",
    ("what reads a lost input is secured all the same", "if («!broken») { settle(", "true",
     "programs/programs::random_programs"),
    ("gradients are kept for replays", "if (!content || «source->pin == pins::GRADIENT») {", "false",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("replays read what other code may write to", "if (content && «source->escaped» &&", "false",
     "hazards_lists::what_other_code_can_write_to_stays_so"),
    ("recipes do not hold on to their constants", "«frame.constants.push_back(std::move(content));»", "",
     "hazards_constants::constants_that_the_program_releases"),
    ("constants do not know what depends on them", "«note_dependent(as_version(read), output);»", "",
     "hazards_mutation::weights_change_while_what_they_made_is_evicted"),
    ("a chain of recipes is searched by recursion", "if («below->secured») continue;",
     "below->secured || secure(source)", ""),
    ("what reads a new constant does not keep it",
     "if (maker != nullptr && maker->secured) «maker->hold().constants.push_back(content);»", "",
     "hazards_constants::what_is_evicted_outlives_what_it_was_made_from_and_the_constant_below"),
    ("what is lost keeps its recipe", "ledger_.drop_scratch(one); } «set_operation(one, nullptr);»", "",
     "hazards_lists::an_operator_that_fails_half_way"),
    ("who else can reach the memory is forgotten when it changes",
     "made->escaped = «target->escaped»;", "false",
     "hazards_lists::what_other_code_can_write_to_stays_so"),
    ("mutations are not counted", "made->mutations = «target->mutations + 1»;", "target->mutations",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("a changed constant forgets why it is one",
     "made->pin = «target->pin == nullptr ? pins::MUTATED : target->pin»;", "pins::MUTATED",
     "native_first_calls::parameters_and_state_become_constants_natively"),
)
native(
    "failing operators", "core/recipes.h",
    ("a half-written storage keeps its recipe", "return «current == nullptr» ? VersionRef() :", "true",
     "hazards_mutation::mutation_that_fails_half_way"),
)
native(
    "deallocation", "core/deallocation.h",
    ("dear inputs are not kept", "«maker_of(one)->keep(dear_inputs(one));»", "",
     "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release"),
    ("cheap inputs are kept, too",
     "if («Wide{ledger_.policy->projected_cost(source)} * one->nbytes "
     "<= Wide{kept} * cost * source->nbytes») continue;", "false",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("dear inputs are not found behind what has been released",
     "} else if («!ledger_.backend.has(source) && pending.size() < FARTHEST») {", "false",
     "rematerialization::dear_inputs_are_found_through_what_has_been_released"),
    ("what is kept for others is kept when it is evicted itself",
     "if («reinterpret_cast<int64_t>(content.get()) != one->key») others.push_back(content);", "true",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("kept inputs are never let go of", "if («came_back_.empty()») return;", "true",
     "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release"),
    ("what one recipe alone reads stays when it has been read",
     "if («others») {", "true",
     "rematerialization::what_only_one_recipe_reads_goes_at_once"),
    ("all that was recomputed stays", "if («ledger_.scratch.size() == 0») return; int64_t allowed", "true",
     "rematerialization::what_was_recomputed_beside_the_target_is_kept_to_a_share"),
    ("recomputed memory that nobody reads any more stays",
     "if («size == 0 || evictions - last_freed_ < size >> 4») return false;", "true", ""),
    ("recomputed memory that recipes read is taken for unread",
     "if ((*one)->locks != 0 || «(*one)->readers != 0» ||", "false",
     "decisions/decisions::a_block_of_the_sample[7]"),
)
native(
    "ledger", "core/ledger.h",
    ("the dead count as resident",
     "} else if (one->resident) { «resident_bytes -= one->nbytes;» one->resident = false;", "",
     "hazards_process::resident_bytes_are_what_the_process_holds"),
    ("what died stays in the pool", "if (!pressure || one->constant()) return; «policy->discard(one);»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what depends on the dead forgets them", "policy->left(one); if («one->used») policy->released(one);",
     "false", ""),
    ("new storages are not counted",
     "versions.put(one); «resident_bytes += one->nbytes;» note_peak", "",
     "hazards_escapes::budget_error_in_an_escape_leaves_no_trace[tolist]"),
    ("the peak is that of the step", "peak_bytes = «std::max(peak_bytes, nbytes)»;", "peak_bytes",
     "rematerialization::what_a_replay_makes_in_vain_is_part_of_the_peak"),
    ("what came back counts as evicted",
     "one->resident = true; «evicted_bytes -= one->nbytes;» resident_bytes += one->nbytes;", "",
     "interposer::what_was_computed_from_a_constant_is_rescued_before_a_part_of_it_changes"),
    ("what came back is not counted",
     "evicted_bytes -= one->nbytes; «resident_bytes += one->nbytes;» note_peak", "",
     "rematerialization::outputs_that_are_there_are_left_alone"),
    ("recomputed memory that goes still counts",
     "scratch_bytes -= one->nbytes; «resident_bytes -= one->nbytes;»", "",
     "interposer::what_was_computed_from_a_constant_is_rescued_before_a_part_of_it_changes"),
    ("recomputed memory is not counted",
     "scratch_bytes += one->nbytes; «resident_bytes += one->nbytes;» one->set_scratch", "",
     "interposer::what_was_computed_from_a_constant_is_rescued_before_a_part_of_it_changes"),
    ("small storages are searched, too", "if (pressure && «one->nbytes >= least_bytes») policy->insert",
     "true", ""),
    ("operators are not counted", "clock += signature.cost; «age++;»", "", ""),
)
native(
    "mutation", "core/mutation.h",
    ("nothing is rescued before a constant changes",
     "if («!constant->needed_by») return true; settle", "true",
     "hazards_lists::what_was_computed_from_the_old_values_is_rescued"),
    ("what is small and held over a step keeps what it was computed from",
     "if («one->resident && !one->constant()» && one->readers == 0", "false",
     "hazards_mutation::a_loss_that_is_held_over_a_step_does_not_hold_the_logits"),
    ("what is in memory alone is rescued",
     "«if (settle(constant, found)) return;» int64_t nbytes", "return;",
     "hazards_mutation::weights_change_while_what_they_made_is_evicted"),
    ("what depends on a constant through others is not rescued", "«stack.emplace_back(node);»", "",
     "faults_budget::a_first_budget_after_counting_only"),
    ("what is evicted is not rescued",
     "} else if («!node->resident && ledger_.backend.has(node)») {", "false",
     "interposer::what_was_computed_from_a_constant_is_rescued_before_a_part_of_it_changes"),
    ("what was released keeps recipes that read a changed constant",
     "for (const VersionRef& node : found.released) «recipes_.lose(node.get());»", "",
     "hazards_lists::an_operator_that_fails_half_way"),
    ("what was computed from a constant that changes keeps its recipe",
     "for (const auto& [node, content] : found.kept) "
     "«recipes_.make_constant(node.get(), pins::INPUT_MUTATED);»", "",
     "faults_budget::a_first_budget_after_counting_only"),
    ("chains of mutations grow for ever", "&& «version->mutations < CHAIN_LIMIT»;", "true",
     "hazards_mutation::a_recipe_has_so_many_mutations_at_most"),
    ("what persists over steps keeps its recipe", "return «version->age >= ledger_.step_age» &&", "true",
     "native_first_calls::parameters_and_state_become_constants_natively"),
)
native(
    "escapes", "core/mutation.h",
    ("what was loaded is evicted once it is overwritten", "|| «pin == pins::LOADED» ||", "false",
     "hazards_saving::memory_that_was_loaded_cannot_be_given_back"),
    ("what is handed out is not marked so",
     "«ledger_.backend.changes(Change::WRITTEN_OUTSIDE, version, why, escapes);»",
     "escapes = false; ledger_.backend.changes(Change::WRITTEN_OUTSIDE, version, why, escapes);",
     "hazards_escapes::arrays_stay_valid_and_are_written_to_later"),
    ("nothing is rescued before a write outside",
     "recipes_.make_constant(version, why); «rescue_.dependents_of(version);»", "",
     "hazards_escapes::writes"),
)
native(
    "mutation", "core/mutation.h",
    ("no weight is worth a copy",
     "return constant->copy || ((«wants(constant)» || must(constant)) && make(constant));", "false",
     "hazards_constants::a_graph_that_is_held_while_its_weights_change_stays_recomputable"),
)
native(
    "mutation", "core/mutation.cpp",
    ("what a backward pass was about outlives it", "(«found_in_backward_» && !ledger_.in_backward)", "false",
     "hazards_constants::nothing_is_copied_after_a_backward_pass_for_what_it_has_let_go_of"),
)
native(
    "history", "core/history.h",
    ("history is never cut", "return «source->age < cut_age» ? Verdict::YES", "false",
     "native_graph::what_loses_its_recipe_is_what_the_model_finds"),
    ("what has lost an input keeps its recipe",
     "return «is_there(source)» ? Verdict::NO : Verdict::YES;", "true",
     "native_graph::what_loses_its_recipe_is_what_the_model_finds"),
    ("trusted constants are taken for lost",
     "return !constant->escaped || «trusted.count(constant) != 0»;", "false",
     "native_graph::a_trusted_constant_is_no_lost_input"),
)
native(
    "copies", "core/copies.h",
    ("copies cost nothing", "«*balance.find(group) -= nbytes << SHARE_SHIFT;»", "",
     "programs/programs::random_programs"),
    ("what has been released has no constants",
     "«groups.join(reader, source);» if (!newly_seen(source, search))", "",
     "programs/programs::random_programs"),
)
native(
    "graph", "core/version.h",
    ("recipes do not count as readers of what they read",
     "const { return «std::count(begin(), end(), static_cast<const Node*>(version))»; }", "int64_t{0}", ""),
    ("long chains are freed by recursion", "if («depth == DEEPEST»)", "false", ""),
)
native(
    "graph", "bindings/nodes.h",
    ("what is being freed is found", "«one->node.leave_weak_references();»", "",
     "native_graph::nobody_finds_a_version_that_is_being_freed"),
)
native(
    "storages", "stored_versions.h",
    ("deaths are not told", "for (Ledger* ledger : ledgers) «storage_died(*ledger, storage);»", "",
     "native_graph::a_death_while_an_error_passes"),
    ("storages get objects that PyTorch knows",
     "if («is_known || !OwnStorages::can_watch(impl)»)", "true",
     "native_graph::gradients_are_summed_in_place_as_without_us"),
)
native(
    "memory outside operators", "outside.h",
    ("storages that Python makes need no room",
     "if («nbytes < NOTICED || !listening_.load(std::memory_order_relaxed)») return false;", "true",
     "outside::the_error_says_what_takes_the_memory"),
    ("what has been met still counts", "blocks_.erase(found); «nbytes_ -= nbytes;»", "",
     "outside::an_optimizer_s_state_is_copied_inside_the_budget"),
)
native(
    "shortage", "shortage.h",
    ("what a kernel reads is evicted for it", "return «Kernel::all_locked» && (!Off::none()", "true", ""),
)
native(
    "placeholders", "faults.h",
    ("a parallel region computes what it reads",
     "bool done = «at::in_parallel_region()» ? asks_elsewhere", "false", ""),
    ("every crash is ours", "bool ours = info->si_code > 0 && «Placeholders::own().has(address)»;", "true",
     ""),
    ("errno is lost", "{ «errno = error_number;» return; }", "", ""),
)
native(
    "placeholders", "admission.h",
    ("addresses on the stack of a library are not looked for",
     "Anchors anchors(versions_, «Words::of_foreign_code()»);", "std::vector<uintptr_t>()", ""),
)
native(
    "kernels of libraries", "bodies.h",
    ("what a kernel reads beside its arguments is not told",
     "«reads_unseen_ = true;» if (!writes && told_", "",
     "hazards_native_code::an_operator_reads_what_it_has_kept_since_before_the_session[True]"),
    ("what a kernel reads from before the session is not told", "if («!is_new && !writes») unmet_", "false",
     "hazards_native_code::an_operator_reads_what_it_has_kept_since_before_the_session[False]"),
    ("what a kernel keeps is not noticed",
     "if («tensor.use_count() > before(tensors_, impl) + before(returned, impl)») return "
     "found.push_back(tensor);", "false", "hazards_native_code::an_operator_keeps_its_argument"),
)
native(
    "tables of PyTorch's", "tables.h",
    ("a function is replaced whose name is another",
     "«symbol.empty()» || symbol.find", "true",
     "lacking::storages_with_another_table[release_resources]"),
)
native(
    "counting", "storages.h",
    ("a counted storage that dies still counts",
     "«owner.census.bytes.fetch_sub(owner.size_of(storage), std::memory_order_relaxed);»", "",
     "counting::peaks_are_those_of_the_full_way"),
    ("a counted storage counts twice once it has a version",
     "if («is_counted(storage)») uncount(storage);", "false",
     "counting::peaks_are_those_of_the_full_way"),
)
native(
    "counting", "counting.h",
    ("new tensors are not counted", "if («!arrival.count_results(own)») meet_results(arrival);", "false",
     "counting::peaks_are_those_of_the_full_way"),
    ("what is new to the session is not entered",
     "«!arrival.is_known({own, terms.device, /*in_memory=*/!all})»", "false",
     "counting::a_later_session_counts_what_an_earlier_one_has_counted"),
    ("a counted kernel takes any amount of memory", "CountedKernel kernel(«room»);", "UNLIMITED",
     "counting::an_operator_that_there_is_no_room_for_is_refused_before_it_has_run[False]"),
    ("what a stopped kernel returns is a result", "run(); if («!kernel.has_refused()») {", "true",
     "counting::a_kernel_is_recognised_as_stopped_whatever_it_makes_of_that"),
    ("what a stopped kernel makes of that is an error",
     "if («!kernel.has_refused()» || is_no_error()) throw;", "true",
     "counting::a_kernel_is_recognised_as_stopped_whatever_it_makes_of_that"),
    ("an interrupt in a stopped kernel is lost", "!kernel.has_refused() || «is_no_error()»", "false",
     "counting::an_interrupt_is_not_lost_in_a_kernel_that_has_been_stopped"),
    ("a stopped kernel warns twice", "«warnings.drop();»", "",
     "counting::a_kernel_that_is_stopped_warns_once"),
    ("what has a version is written to without notice",
     "«!own.counts(first->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl())»",
     "false", "counting_backward::the_same_bits"),
    ("what autograd records is only counted", "return «!at::GradMode::is_enabled()» &&", "true",
     "counting_backward::what_autograd_records_is_handled_in_full"),
    ("a backward pass makes any amount that stays",
     "CountedKernel::Exact kernel(«room», own.mask());", "UNLIMITED",
     "counting_backward::what_is_counted_and_stays_takes_a_64th_of_the_budget"),
    ("evictions do not wait for counted kernels", "is_evicting_++;\n    «wait();»", "",
     "counting_backward::what_a_counted_kernel_reads_is_not_evicted_meanwhile"),
    ("counting never ends",
     "if («own.census.note() > own.census.ample.load(std::memory_order_relaxed)») end_counting();",
     "(own.census.note(), false)", ""),  # the next operator that is handled in full ends it
)
native(
    "counting", "arrival.h",
    ("what has been evicted is read", "!(ours.in_memory && «is_empty(storage)»)", "false",
     ""),  # on a CPU, it is brought back by the handler of faults
)
native(
    "counting", "core/recipes.cpp",
    ("recipes outlive changes that were only counted",
     "if («!one->constant()») make_constant(one, pins::COUNTED);", "false",
     "counting::recipes_do_not_outlive_changes_that_are_only_counted"),
    ("what was filled while operators were counted is blank",
     "if («one->pin == pins::UNINITIALISED») one->pin = pins::COUNTED;", "false",
     "counting::what_was_filled_meanwhile_is_not_blank"),
)
native(
    "counting", "core/ledger.h",
    ("as much is ample although the limit has fallen",
     "if («counting() && nbytes < UNLIMITED») census->ample =", "false",
     "counting::less_is_ample_once_memory_outside_of_tensors_has_been_taken"),
)
