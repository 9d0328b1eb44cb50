// Runs one recorded operation again, once its inputs are in memory and locked (paper, Sec. 2 and App. C.4).
#pragma once

#include "eviction.h"

namespace dtrrun {

class Recomputer {
 public:
  Recomputer(Ledger& ledger, Deallocation& deallocation, Eviction& eviction)
      : ledger_(ledger), deallocation_(deallocation), eviction_(eviction) {}

  int64_t rematerializations = 0, rematerialized_bytes = 0;

  // Returns the bytes that running an operation needs, given that its inputs are locked.
  int64_t needs(const Recorded* maker, bool without_workspace) const { return needs(maker, uses_of(maker), without_workspace); }

  // Runs an operation whose inputs are locked, for a version that it makes. Returns false if an input has gone. Raises the budget
  // error.
  bool run(Version* wanted, Recorded* maker, bool without_workspace) {
    Ledger& ledger = ledger_;
    Ledger::Using here(ledger, wanted);
    Backend& backend = ledger.backend;
    dtrrun::Run now = std::exchange(spare_, {});
    now.wanted = wanted;
    now.maker = maker;
    now.cost = 0;
    set_uses(now.uses, maker);
    for (Node* source : *maker) {  // held, since a garbage collection while making room would free what only cycles hold
      StorageRef content = ledger.memory_of(as_version(source));
      if (!content) return false;
      now.held.push_back(std::move(content));
    }
    eviction_.make_room(needs(maker, now.uses, without_workspace), maker->signature);
    for (Node* source : *maker)
      if (as_version(source)->escaped || as_version(source)->away) backend.check_unchanged(as_version(source));
    int64_t began = backend.begins();
    std::vector<VersionRef> taken;  // old versions whose memory the operation writes to
    for (size_t place = 0; place < now.uses.size(); place++)
      if (now.uses[place] == Use::TAKE) taken.emplace_back(maker->tensor(place).version);
    try {
      backend.execute(now);
    } catch (...) {
      drop(taken);
      throw;
    }
    ledger.use(wanted->device);  // another thread may have had its turn
    drop(taken);
    now.held.clear();
    ledger.recomputed_ns += now.cost;
    ledger.clock += maker->signature->cost;
    ledger.recomputed_cost += maker->signature->cost;
    collect(now);
    for (const VersionRef& source : taken) ledger.policy->released(source.get());  // only now does nothing evicted depend on it
    backend.ran(now);
    if (began != 0) backend.rematerialized(now, began);
    now.made.clear();
    std::swap(spare_, now);
    return true;
  }

  // Called when a version is unlocked before the operation that it was locked for has run.
  void idle(Version* source) {
    if (is_recomputed(source) && source->locks == 0 && ledger_.pressure) ledger_.policy->insert(source);
  }
  // Called when an operation that has read a version is over. Frees the version if it was recomputed for that operation alone.
  void read(Version* source, const Recorded* maker) {
    if (is_recomputed(source) && source->locks == 0) deallocation_.was_read(source, is_read_by_others(source, maker));
  }

 private:
  // Returns whether its scratch memory was recomputed, and is not the copy of a constant.
  static bool is_recomputed(const Version* source) { return source->scratch && !source->constant(); }
  // A version in the pool counts as read by others: it can be evicted from there when memory runs short.
  static bool is_read_by_others(const Version* source, const Recorded* maker) {
    return source->readers > maker->reads_of(source) || source->pool_id != 0;
  }
  // Decides how each tensor is used. Where it writes to an old version, it gets a copy, or the memory itself if no other recipe
  // reads that version.
  static std::vector<Use> uses_of(const Recorded* maker) {
    std::vector<Use> uses;
    set_uses(uses, maker);
    return uses;
  }
  static void set_uses(std::vector<Use>& uses, const Recorded* maker) {
    size_t count = maker->tensor_count();
    uses.assign(count, Use::READ);
    for (size_t place = 0; maker->tensors && place < count; place++)
      if (TensorEntry entry = maker->tensor(place); entry.version == nullptr)
        uses[place] = entry.same < 0 ? Use::BLANK : Use::AGAIN;
    ShortMap<const Version*, Use> written;  // with what is done with the next tensor over each
    maker->each_written([&](size_t place) {
      if (Version* target = maker->tensor(place).version) written[target] = may_take(target, maker) ? Use::TAKE : Use::COPY;
    });
    for (size_t place = 0; !written.empty() && place < count; place++) {
      auto target = written.find(maker->tensor(place).version);
      if (target != written.end()) uses[place] = std::exchange(target->second, Use::AGAIN);
    }
  }
  // Returns whether only this operation reads an old version, so that it may write to that memory.
  static bool may_take(const Version* source, const Recorded* maker) {
    return is_recomputed(source) && source->locks == 1 && !is_read_by_others(source, maker);
  }
  static int64_t needs(const Recorded* maker, const std::vector<Use>& uses, bool without_workspace) {
    int64_t nbytes = maker->signature->output_bytes - (without_workspace ? maker->signature->workspace : 0);
    for (size_t place = 0; place < uses.size(); place++) {
      if (uses[place] == Use::COPY) nbytes += maker->tensor(place).version->nbytes;
      if (uses[place] == Use::BLANK) nbytes += maker->tensor(place).nbytes;
    }
    return nbytes;
  }
  void drop(const std::vector<VersionRef>& taken) {
    for (const VersionRef& source : taken) {
      ledger_.drop_scratch(source.get());
      ledger_.policy->discard(source.get());
    }
  }

  // Gives what an operation has made to the versions that are not resident, and drops the rest.
  void collect(dtrrun::Run& now) {
    ledger_.note_peak(ledger_.resident_bytes + now.maker->signature->output_bytes);
    // Not to what is on the host: if that has become a constant, it may have been written to since.
    if (!now.maker->outputs) {
      if (now.wanted->is_dropped()) give(now, now.wanted, now.made.at(0));
      return;
    }
    std::vector<std::pair<VersionRef, StorageRef>> made;
    for (size_t i = 0; i < now.maker->outputs->size(); i++) {
      Version* one = (*now.maker->outputs)[i].version.get();
      if (one != nullptr && one->is_dropped()) made.emplace_back(VersionRef(one), now.made.at(i));
    }
    for (auto& [one, storage] : made) give(now, one.get(), std::move(storage));
  }
  void give(const dtrrun::Run& now, Version* one, StorageRef storage) {
    if (!ledger_.backend.holds(storage.get(), one->nbytes)) ledger_.backend.made_otherwise(now, storage.get(), one->nbytes);
    if (StorageRef emptied = ledger_.memory_of(one)) {
      ledger_.backend.refill(emptied.get(), storage.get());
      ledger_.restored(one);
    } else if (one == now.wanted || one->locks != 0) {
      ledger_.hold_scratch(one, std::move(storage));
    } else {
      return;
    }
    rematerializations++;
    rematerialized_bytes += one->nbytes;
    one->last_access = ledger_.clock;
    if (!ledger_.pressure) return;
    ledger_.policy->left(one);
    if (!one->scratch) ledger_.evictable(one);
  }

  Ledger& ledger_;
  Deallocation& deallocation_;
  Eviction& eviction_;
  dtrrun::Run spare_{};  // of the last replay, kept for its memory
};

}  // namespace dtrrun
