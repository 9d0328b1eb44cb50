"""Native mutants of the choice of what to evict: scores, neighbourhoods, the search."""

from __future__ import annotations

from native import native

# Of each: what goes wrong, the code with the piece that is replaced, what is put in its place, who notices.
# fmt: off

native(
    "scores", "scores.h",
    ("size does not matter",
     "divided(cost_ ? cost : 1, «size_ ? size : 1», staleness_ ? staleness : 1);", "int64_t{1}",
     "native_policy::it_runs_logs_alike"),
    ("cost does not matter",
     "divided(«cost_ ? cost : 1», size_ ? size : 1, staleness_ ? staleness : 1);", "int64_t{1}",
     "native_policy::it_runs_logs_alike"),
    ("large numbers are rounded twice", "if (dividend % divisor != 0) «quotient |= 1;»", "", ""),
    ("roots of staleness are left out",
     "(static_cast<double>(size) * «std::pow(static_cast<double>(staleness), exponent)»);",
     "static_cast<double>(staleness)", "native_policy::it_runs_logs_alike"),
)
native(
    "search", "search.h",
    ("staleness does not matter",
     "return «score_.ages ? std::max<int64_t>(now - version_.last_access.number(node), 1) : 1»;",
     "int64_t{1}", "native_policy::it_runs_logs_alike"),
    ("the last of equals is chosen",
     "score != other.score ? score > other.score : «number > other.number»;", "number < other.number",
     "native_policy::scores_of_equal_value_go_to_the_first"),
    ("bounds are too high",
     "push(bounds_, {«share / score_.aged(stalest) * ROUNDING», number, item->entry});", "share * 2",
     "native_policy::it_runs_logs_alike"),
    ("what may not be evicted now is lost to the search",
     "for (const Candidate& one : refused) «put_to_sleep(one.number, one.share, now, least, true);»", "",
     "native_policy::it_runs_logs_alike"),
    ("what has been released is as dear as the rest",
     "double found = «version_.scratch.is_none(node) ? 1 : score_.released»;", "1.0",
     "native_policy::it_runs_logs_alike"),
    ("the next use does not matter", "«distance = next - foresight_.position();»", "",
     "native_policy::it_runs_logs_alike"),
)
native(
    "neighbourhoods", "neighbourhood.h",
    ("neighbourhoods cost nothing", "«reach.cost += member->cost;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("evicted descendants are left out", "if (!ancestors_only_) «walked_below(node, number, item);»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what was cached of ancestors stays",
     "if (item.reach) «item.reach->above_known = item.reach->cost_known = false;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what was cached of descendants stays",
     "if (item.reach) «item.reach->below_known = item.reach->cost_known = false;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("scores are not computed anew when a neighbour comes back",
     "«pool_.make_due(member->watchers);» pool_.make_due(member->watchers_below);", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("costs are not computed anew when an ancestor comes back",
     "«forget_above(member->watchers_below);»", "", "decisions/decisions::a_block_of_the_sample[7]"),
)
native(
    "components", "components.h",
    ("components cost nothing", "roots_.push_back(root); «cost += root->total;» } return cost;", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("united components cost as much as one", "«a->total += b->total;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what has come back still costs", "«root->total -= element->cost;»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("watchers of a component are forgotten when it is united",
     "«a->watchers_of_all.take(b->watchers_of_all);»", "", "native_policy::it_runs_logs_alike"),
    ("what was released stays out of components for ever",
     "if («element->above > DORMANT») evicted(node);", "false", "native_policy::it_runs_logs_alike"),
    ("a component that has become cheap is not looked at again",
     "if («static_cast<double>(root->total) < root->floor») {", "false", "native_policy::it_runs_logs_alike"),
)
native(
    "pool", "pool.h",
    ("the pool does not know its bytes", "«nbytes -= version_.nbytes.number(node);» Ref last", "",
     "programs/programs::random_programs"),
)
native(
    "evicted storages", "evicted.h",
    ("evicted storages do not know their dependents",
     "if («members.empty() || members.back().get() != member») members.emplace_back(member);", "false",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what is gone still counts as a dependent", "{ return «!member.get()->gone»; });", "true",
     "decisions/decisions::a_block_of_the_sample[7]"),
)
native(
    "policy", "policy.h",
    ("what was released is out of every neighbourhood",
     "pool_.discard(node); if (!nodes_.constant(node)) «neighbourhood_->released(node);»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("what came back is still in neighbourhoods", "«neighbourhood_->left(node);»", "",
     "decisions/decisions::a_block_of_the_sample[7]"),
    ("projected costs are those of the operator alone",
     "«return neighbourhood_->projected_cost(node, nodes_.version.bound.number(node), *item);»",
     "return nodes_.version.cost.number(node);",
     "rematerialization::a_perceptron_trains_in_two_fifths_of_its_peak"),
)
