"""Native mutants of what is evicted, kept and counted."""

from __future__ import annotations

from native import native

# Of each: what goes wrong, the code with the piece that is replaced, what is put in its place, who notices.
# fmt: off

native(
    "eviction", "evict.h",
    ("what is locked may be evicted",
     "if («version_.locks.number(one) != 0» || !version_.resident.is_true(one) || "
     "version_.operation.is_none(one))", "false",
     "interposer::what_was_brought_back_for_an_operator_stays_until_it_has_run "
     "programs/programs::random_programs"),
    ("what has just died may be evicted",
     "return !(warn_only_ && any_replaying()); «return Accounts::has_storage(one);»", "return true;", ""),
    ("with a budget that cannot be kept, what was just recomputed is evicted",
     "if (!version_.scratch.is_none(one)) return «!(warn_only_ && any_replaying())»;", "true", ""),
    ("nothing is secured before its eviction",
     "if («secure(victim.get())») evict(victim.get(), storage.get());", "true",
     "hazards_mutation::weights_change_while_what_they_made_is_evicted"),
    ("what reads a lost input is secured all the same", "if («!broken») { settle(", "true",
     "programs/programs::random_programs"),
    ("gradients are kept for replays", "if (!content || «is_gradient(source)») {", "false",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("replays read what other code may write to",
     "if (content && «version_.escaped.is_true(source)» &&", "false", ""),
    ("recipes do not hold on to their constants", "«frame.constants.push_back(object_of(content));»", "",
     "hazards_constants::constants_that_the_program_releases"),
    ("constants do not know what depends on them", "{ «note_dependent(inputs, output);» });", "",
     "hazards_mutation::weights_change_while_what_they_made_is_evicted"),
    ("dear inputs are not kept",
     "«operation_.kept_inputs.take(version_.operation.get(one), dear_inputs(one).release());»", "",
     "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release"),
    ("cheap inputs are kept, too",
     "if («accounts_.rule.projected_cost(source) * nbytes <= own») continue;", "false",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("dear inputs are not found behind what has been released",
     "if («is_released(source) && pending.size() < FARTHEST») pending.emplace_back", "false",
     "rematerialization::dear_inputs_are_found_through_what_has_been_released"),
    ("what is kept for others is kept when it is evicted itself",
     "if («key_of(content) != version_.key.number(one)») PyList_Append(others", "true",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("kept inputs are never let go of", "if («PyList_GET_SIZE(came_back_.get()) != 0») checked(", "false",
     "rematerialization::dear_inputs_of_a_cheap_evicted_storage_outlive_their_release"),
    ("what one recipe alone reads stays when it has been read",
     "if («others») { if (accounts_.is_true", "true",
     "rematerialization::what_only_one_recipe_reads_goes_at_once"),
    ("all that was recomputed stays",
     "if («PyDict_GET_SIZE(scratch) == 0») return; int64_t allowed", "true",
     "rematerialization::what_was_recomputed_beside_the_target_is_kept_to_a_share"),
    ("recomputed memory that nobody reads any more stays",
     "if («size == 0 || evictions - swept_.number(deallocation_.get()) < size >> 4») return false;", "true",
     ""),
    ("recomputed memory that recipes read is taken for unread", "if («read_by_others») continue;", "false",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("there is always room",
     "return «accounts_.number(ledger_.resident_bytes) + nbytes <= accounts_.number(ledger_.limit)»;",
     "true", "rematerialization::the_fast_path_keeps_to_the_budget"),
    ("no garbage is looked for where nothing is left to evict",
     'else if («checked(PyObject_CallMethod(eviction_.get(), "collect_garbage", nullptr)).get() != '
     "Py_True»)", "true", ""),
)
native(
    "ledger", "ledger.h",
    ("who else can reach the memory is forgotten when it changes",
     "version.escaped.set(made.get(), «version.escaped.is_true(target)»);", "false", ""),
    ("mutations are not counted",
     "version.mutations.set_number(made.get(), «version.mutations.number(target) + 1»);",
     "version.mutations.number(target)", "decisions/decisions::a_block_of_the_sample[7]"),
    ("a changed constant forgets why it is one",
     "version.pin.set(made.get(), «pin == Py_None ? mutated_.get() : pin»);", "mutated_.get()", ""),
    ("the dead count as resident",
     "} else if (version.resident.is_true(one)) { «add(counters.resident_bytes, -nbytes);» "
     "version.resident.set(one, false);", "", ""),
    ("what died stays in the pool",
     "if (pressure && !version.operation.is_none(one)) { «rule.discard(one);»", "", ""),
    ("what depends on the dead forgets them", "rule.left(one); if («used») rule.released(one);", "false",
     ""),
    ("new storages are not counted",
     "versions_.put(as_stored(made.get())); «add(counters.resident_bytes, nbytes);» note_peak", "", ""),
    ("the peak is that of the step", "if («nbytes > number(counters.peak_bytes)») counters", "false", ""),
    ("what came back counts as evicted",
     "«add(counters.evicted_bytes, -nbytes);» add(counters.resident_bytes, nbytes); note_peak", "", ""),
    ("recomputed memory that goes still counts",
     "PyDict_DelItem(blocks_.get(), place.get()); «add(counters.resident_bytes, -nbytes);»", "", ""),
    ("recomputed memory is not counted",
     "add(counters.scratch_bytes, nbytes); «add(counters.resident_bytes, nbytes);» version.scratch.set", "",
     ""),
    ("what is lost keeps its recipe", "drop_scratch(one); } «version.operation.clear(one);»", "", ""),
    ("small storages are searched, too",
     "«version.nbytes.number(one) >= number(counters.least_bytes)») rule.insert", "true", ""),
    ("operators are not counted",
     "add(counters.clock, signature.cost.number(found)); «add(counters.age, 1);»", "", ""),
    ("the clock stands still",
     "«add(counters.clock, signature.cost.number(found));» add(counters.age, 1);", "", ""),
)
native(
    "mutation", "mutation.h",
    ("nothing is rescued before a constant changes",
     "if («version_.needed_by.is_none(constant)») return true; accounts_.collect_dead();", "true", ""),
    ("what depends on a constant through others is not rescued", "«stack.push_back(std::move(node));»", "",
     ""),
    ("what is evicted is not rescued",
     "} else if («!is_resident && !version_.superseded.is_true(node.get()) && "
     "Accounts::has_storage(node.get())»)", "false", ""),
    ("what was released keeps recipes that read a changed constant",
     "for (const Ref& node : released) «accounts_.lose(node.get());»", "", ""),
    ("what was computed from a constant that changes keeps its recipe",
     "for (const auto& [node, content] : resident) «make_constant(node.get(), why_.get());»", "", ""),
    ("what reads a new constant does not keep it", "if («!version_.needed_by.is_none(one)») {", "false", ""),
    ("no weight is worth a copy",
     'return «checked(PyObject_CallMethod(copies, "wants", "O", one)).get() == Py_True»;', "false", ""),
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
    ("copies cost nothing", "«balance[place.first] -= nbytes << SHARE_SHIFT;»", "",
     "programs/programs::random_programs"),
    ("what has been released has no constants",
     "«groups.join(reader, source);» if (seen.insert(source).second)", "",
     "programs/programs::random_programs"),
)
native(
    "graph", "bindings/nodes.h",
    ("recipes do not count as readers of what they read",
     "Py_ssize_t found = «std::count(one->operation.begin(), one->operation.end(), node_of(version))»;",
     "Py_ssize_t{0}", ""),
    ("long chains are freed by recursion", "if («depth == DEEPEST»)", "false", ""),
)
native(
    "storages", "versions.h",
    ("deaths are not told", "for (Versions* table : tables) «table->died(storage);»", "", ""),
    ("storages get objects that PyTorch knows",
     "if («is_known || !WatchedStorage::can_watch(impl)»)", "true", ""),
)
native(
    "memory outside operators", "outside.h",
    ("storages that Python makes need no room",
     "if («nbytes < NOTICED || !listening_.load(std::memory_order_relaxed)») return false;", "true", ""),
    ("what has been met still counts", "blocks_.erase(found); «nbytes_ -= nbytes;»", "", ""),
)
native(
    "shortage", "door.h",
    ("what a kernel reads is evicted for it",
     "auto lock = [&](PyObject* one) { «door_.version.locks.add(one, on ? 1 : -1);» };", "", ""),
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
    "placeholders", "ready.h",
    ("addresses on the stack of a library are not looked for",
     "Anchors anchors(accounts_, «Words::of_foreign_code()»);", "std::vector<uintptr_t>()", ""),
)
native(
    "kernels of libraries", "bodies.h",
    ("what a kernel reads beside its arguments is not told",
     "«reads_unseen_ = true;» if (!writes && told_", "", ""),
    ("what a kernel reads from before the session is not told", "if («!is_new && !writes») unmet_", "false",
     ""),
    ("what a kernel keeps is not noticed",
     "if («tensor.use_count() > before(tensors_, impl) + before(returned, impl)») return "
     "found.push_back(tensor);", "false", ""),
)
