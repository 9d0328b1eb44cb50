#include "mutation.h"

namespace dtrrun {

// -- copies ----------------------------------------------------------------------------------------------------

bool Copies::make(Version* constant) {
  StorageRef content = ledger_.memory_of(constant);
  Ledger::Using now(ledger_, constant);
  if (!content || !(eviction_.try_room(constant->nbytes) || eviction_.goes_over())) return false;
  StorageRef copy = ledger_.backend.copy(content.get());
  if (!copy) return false;  // the system has no memory for it
  ledger_.keep_copy(constant, std::move(copy));
  return true;
}

bool Copies::wants(const Version* constant) {
  if (!(ledger_.pressure && constant->used) || constant->copy) return false;
  if (!constant->constant() || constant->escaped || !constant->resident || ledger_.paused != 0) return false;
  if (ledger_.age > until_ || (found_in_backward_ && !ledger_.in_backward)) {
    ledger_.collect_dead();
    most_ = largest_copy(ledger_.versions.all(), ledger_.backend);
    look_counts_for(ledger_.versions.size());
    chosen_.reset();
  }
  if (constant->nbytes > most_) return false;
  if (!chosen_) {
    ledger_.collect_dead();
    Weighed found = weigh(ledger_.versions.all(), ledger_.backend);
    chosen_ = std::move(found.keys);
    chosen_at_ = ledger_.age;
    look_counts_for(found.looked_at);
  }
  return constant->age <= chosen_at_ && chosen_->count(constant->key) != 0;
}

// -- rescue ----------------------------------------------------------------------------------------------------

void Rescue::rescue(Version* constant) {
  settle_small_results();
  while (constant->needed_by) {
    Found found = find(constant);
    if (settle(constant, found)) return;
    int64_t nbytes = 0;
    for (const VersionRef& one : found.evicted) nbytes += one->nbytes;
    if (ledger_.backend.collect_before_rescue(nbytes)) continue;  // the program may not have them any more
    {
      Locked locked(found.evicted);
      for (const VersionRef& one : found.evicted) {
        std::vector<VersionRef> target;
        target.emplace_back(one.get());
        try {
          rematerializer_.materialize(target, true);
        } catch (...) {
          if (!ledger_.backend.is_loss()) throw;
          if (one->resident || one->constant()) continue;
          recipes_.lose(one.get());
          one->pin = pins::AWAY;
        }
      }
    }
    for (const VersionRef& one : found.evicted)
      if (one->resident) recipes_.make_constant(one.get(), pins::INPUT_MUTATED);
    // The rescue may have evicted another dependent to make room, so look again.
  }
}

bool Rescue::resident_dependents_of(Version* constant) {
  if (!constant->needed_by) return true;
  settle_small_results();
  Found found = find(constant);
  if (!found.evicted.empty()) return false;
  settle(constant, found);
  return true;
}

void Rescue::settle_small_results() {
  if (ledger_.age <= settled_until_ || ledger_.budget_bytes < 0 || ledger_.paused != 0) return;
  ledger_.collect_dead();
  settled_until_ = ledger_.age + static_cast<int64_t>(ledger_.versions.size());
  std::vector<VersionRef> small;
  for (Version* one : ledger_.versions.all())
    if (one->resident && !one->constant() && one->readers == 0 && one->nbytes <= ledger_.limit >> SMALL_SHIFT)
      small.emplace_back(one);
  for (const VersionRef& one : small) recipes_.make_constant(one.get(), pins::INPUT_MUTATED);
}

Rescue::Found Rescue::find(Version* constant) {
  ledger_.collect_dead();
  Found found;
  int64_t search = next_search();
  std::vector<VersionRef> stack;
  stack.emplace_back(constant);
  while (!stack.empty()) {
    VersionRef one = std::move(stack.back());
    stack.pop_back();
    one->each_dependent([&](Version* node) {
      if (node->constant() || !newly_seen(node, search)) return;
      bool is_kept = (node->resident && !node->scratch) || node->has_left();
      if (StorageRef content = is_kept ? ledger_.memory_of(node) : StorageRef()) {
        found.kept.emplace_back(VersionRef(node), std::move(content));
      } else if (!node->resident && ledger_.backend.has(node)) {
        found.evicted.emplace_back(node);
      } else {
        found.released.emplace_back(node);
        stack.emplace_back(node);
      }
    });
  }
  return found;
}

bool Rescue::settle(Version* constant, const Found& found) {
  for (const auto& [node, content] : found.kept) recipes_.make_constant(node.get(), pins::INPUT_MUTATED);
  if (!found.evicted.empty()) return false;
  for (const VersionRef& node : found.released) recipes_.lose(node.get());  // so what is computed from it is no longer replayable
  constant->needed_by.reset();
  return true;
}

// -- mutations -------------------------------------------------------------------------------------------------

void Mutation::pin(Version* version, Pin why) {
  ledger_.backend.changes(Change::PINNED, version, why, false);
  recipes_.make_constant(version, why);
  version->pin = why;
}

void Mutation::escape(Version* version, Pin why) {
  ledger_.backend.changes(Change::ESCAPES, version, why, false);
  Ledger::forget_host_copy(version);
  if (!version->escaped || ledger_.backend.trusts(version)) {
    constant_about_to_change(version, why);
    version->escaped = true;
    version->pin = why;
  }
  ledger_.backend.give_up(version);
}

void Mutation::escape_together(const std::vector<VersionRef>& versions, Pin why) {
  Locked locked(versions);
  for (const VersionRef& one : versions) escape(one.get(), why);
}

void Mutation::written_outside(Version* version, Pin why, bool escapes) {
  ledger_.backend.changes(Change::WRITTEN_OUTSIDE, version, why, escapes);
  Ledger::forget_host_copy(version);
  if (!version->constant() || !copies_.keep(version)) constant_about_to_change(version, why);
  version->escaped = version->escaped || escapes;  // inherited by later versions
  if (escapes) ledger_.backend.give_up(version);
  no_longer_blank(version);
  if (version->pin == nullptr) version->pin = why;
  if (version->used) recipes_.supersede(version, nullptr, 0);
}

void Mutation::constant_about_to_change(Version* version, Pin why) {
  struct Escaped {
    Version* version;
    bool before;
    ~Escaped() { version->escaped = before; }
  } meanwhile{version, std::exchange(version->escaped, true)};
  ledger_.backend.escaped_changes(version);
  recipes_.make_constant(version, why);
  rescue_.dependents_of(version);
}

}  // namespace dtrrun
