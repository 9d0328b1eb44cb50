"""Native mutants of the choice of what to evict: scores, neighbourhoods, the search."""

from __future__ import annotations

from native import native

ALL_OF_THE_MODEL = "unit/policy::the_choices_are_the_model_s"

# Of each: what goes wrong, the code with the piece that is replaced, what is put in its place, who notices.
# fmt: off

native(
    "scores", "core/policy/heuristic.h",
    ("size does not matter",
     "divided(cost ? projected_cost : 1, «size ? nbytes : 1», staleness ? since : 1);", "int64_t{1}",
     ALL_OF_THE_MODEL),
    ("cost does not matter",
     "divided(«cost ? projected_cost : 1», size ? nbytes : 1, staleness ? since : 1);", "int64_t{1}",
     ALL_OF_THE_MODEL),
    ("large numbers are rounded twice", "if (dividend % divisor != 0) «quotient |= 1;»", "", ""),
    ("roots of staleness are left out",
     "(static_cast<double>(nbytes) * «std::pow(static_cast<double>(since), exponent)»);",
     "static_cast<double>(since)", ALL_OF_THE_MODEL),
)
native(
    "search", "core/policy/heap_search.h",
    ("staleness does not matter",
     "return «heuristic_.staleness ? std::max<int64_t>(now - node->last_access, 1) : 1»;",
     "int64_t{1}", ALL_OF_THE_MODEL),
    ("the last of equals is chosen",
     "score != other.score ? score > other.score : «number > other.number»;", "number < other.number",
     ALL_OF_THE_MODEL),
    ("bounds are too high",
     "push(bounds_, {«share / heuristic_.aged(stalest) * ROUNDING», number, item->entry});", "share * 2",
     ALL_OF_THE_MODEL),
    ("what may not be evicted now is lost to the search",
     "for (const Candidate& one : refused) «put_to_sleep(one.number, one.share, now, least, true);»", "",
     ALL_OF_THE_MODEL),
)
native(
    "search", "core/policy/search.h",
    ("what has been released is as dear as the rest",
     "double found = «node->released ? heuristic_.released : 1»;", "1.0", ALL_OF_THE_MODEL),
    ("the next use does not matter",
     "next == NEVER ? foresight_->horizon() : «next - foresight_->position()»;", "foresight_->horizon()",
     ALL_OF_THE_MODEL),
    ("a sample is the whole pool", "if («sample_ && !large.empty()»)", "false",
     "unit/policy::a_sample_is_the_root_of_the_pool"),
    ("small storages are chosen like others", "if («ignore_small_ == 0» || pool_.size() == 0) return 0;",
     "true", "unit/policy::small_nodes_are_chosen_last"),
)
native(
    "neighbourhoods", "core/policy/neighbourhood.h",
    ("neighbourhoods cost nothing", "walks_) «reach.cost += member->cost;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("evicted ancestors cost nothing", "«reach.cost_above += member->cost;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("evicted descendants are left out", "«walked_below(node, number, item);» if (!reach.cost_known)", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what was cached of ancestors stays",
     "«item.reach.above_known = item.reach.cost_known = false;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what was cached of descendants stays",
     "«item.reach.below_known = item.reach.cost_known = false;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("scores are not computed anew when a neighbour comes back",
     "«pool_.make_due(member->watchers);» pool_.make_due(member->watchers_below);", "",
     "unit/policy::the_choices_are_the_model_s[e_star]"),
    ("costs are not computed anew when an ancestor comes back",
     "«forget_above(member->watchers_below);»", "", "decisions/decisions::a_block_of_the_sample[7]"),
)
native(
    "components", "core/policy/components.h",
    ("components cost nothing", "roots_.push_back(root); «cost += root->total;» } return cost;", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("united components cost as much as one", "«a->total += b->total;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what has come back still costs", "«root->total -= element->cost;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("watchers of a component are forgotten when it is united",
     "«a->watchers_of_all.take(b->watchers_of_all);»", "",
     "unit/policy::who_watches_a_component_watches_what_it_becomes_a_part_of[heap]"),
    ("what was released stays out of components for ever",
     "if («element->above > DORMANT») evicted(node);", "false",
     "unit/policy::long_chains_of_released_storages_are_joined"),
    ("a component that has become cheap is not looked at again",
     "if («static_cast<double>(root->total) < root->floor») {", "false", ALL_OF_THE_MODEL),
)
native(
    "pool", "core/policy/pool.h",
    ("prices do not fall when a neighbour comes back",
     "if («std::exchange(item.priced, false)») fallen.push_back(number);", "false",
     "unit/fragmentation::what_has_become_cheaper_is_found"),
    ("the pool does not know its bytes", "if (item) «nbytes -= node->nbytes;»", "",
     "programs/programs::random_programs"),
    ("what is noted twice is forgotten",
     "return item == nullptr || «std::exchange(item->seen, drops_) == drops_»;", "true",
     "unit/policy::so_they_are_in_long_runs[h_dtr]"),
)
native(
    "evicted storages", "core/policy/evicted.h",
    ("evicted storages do not know their dependents",
     "«new (list->members() + list->count_++) Reference(member);»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what is gone still counts as a dependent",
     "all.end(), [](const Reference& one) { return «!one.get()->gone»; });", "true",
     "decisions/decisions::a_block_of_the_sample[7]"),
)
native(
    "policy", "core/policy/policy.h",
    ("what was released is out of every neighbourhood",
     "pool_.discard(node); if (!node->constant()) «neighbourhood_->released(node);»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what came back is still in neighbourhoods", "«neighbourhood_->left(node);»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("projected costs are those of the operator alone",
     "item == nullptr ? node->cost : «neighbourhood_->projected_cost(node, node->pool_id, *item)»;",
     "node->cost",
     "rematerialization::a_perceptron_trains_in_two_fifths_of_its_peak"),
)
native(
    "prices", "core/policy/prices.h",
    ("what ages counts as less aged than it is",
     "std::pow(std::ldexp(static_cast<double>(«high + 1»), left_out), exponent)", "high / 2",
     "unit/fragmentation::as_good_as_trying_all_windows"),
)
native(
    "windows", "windows.h",
    ("the window with the least bound is taken",
     "if («window.exact» && !is_taken(window))", "true",
     "unit/fragmentation::as_good_as_trying_all_windows"),
    ("windows are longer than needed",
     "while («run.nbytes - blocks_[run.first].nbytes >= wanted») run", "false",
     "unit/fragmentation::as_good_as_trying_all_windows"),
    ("a block is in two windows",
     "found.emplace_back(one);\n      blocks_[place].price = «NEVER_GOES»;", "blocks_[place].price",
     "unit/fragmentation::among_thousands_of_blocks_the_next_windows_go_as_well"),
)
native(
    "flushes", "flushes.h",
    ("windows go whatever they cost", "return «REST * flush_ns(free, wanted, 1)»;", "INT64_MAX",
     "unit/oom_retry::neighbours_that_are_dearer_than_a_flush_stay[True]"),
    ("a search is noted though much memory is free", "if («unused <= cap / CROWDED_SHARE») unused_", "true",
     "unit/oom_retry::what_tensors_could_still_take_is_noted_if_a_request_finds_no_block"),
)
