// Storages that the program releases (paper, Sec. 2, and App. C.4 and C.5).
//
// `Ledger::collect_dead` accounts for deallocations at once. This file decides about memory that the program has released, or is
// about to release, and that rematerializations may still need.
#pragma once

#include "ledger.h"

namespace dtrrun {

constexpr size_t FARTHEST = 16;     // maximum number of released versions through which a search goes on

class Deallocation {
 public:
  explicit Deallocation(Ledger& ledger) : ledger_(ledger) {}

  // Variables for experiments (`tests/bench/replays.py`).
  int64_t kept = 4;           // inputs are kept if they cost more than this many times as much per byte
  int64_t scratch_shift = 3;  // recomputed storages are kept up to an eighth of the budget

  // -- inputs of what is evicted --

  // Keeps those inputs of a version about to be evicted that cost much more to recompute than the version does. The program may
  // release them before it needs the version: a DenseNet's feature maps, from which cheap concatenations are made; a gradient from
  // which the next one was computed. They stay evictable. If an input has been released already (`r - a * h`), what it was computed
  // from is considered instead.
  void keep_inputs(Version* one) {
    maker_of(one)->keep(dear_inputs(one));
    int64_t search = next_search();
    auto& pending = pending_;
    pending.assign(1, {one, 0});
    for (size_t i = 0; i < pending.size(); i++) {
      pending[i].first->each_dependent([&](Version* reader) {
        Recorded* maker = maker_of(reader);
        if (maker == nullptr || !newly_seen(reader, search)) return;
        if (maker->held && !maker->held->kept_inputs.empty()) {
          std::vector<StorageRef> others;
          for (const StorageRef& content : maker->held->kept_inputs)
            if (reinterpret_cast<int64_t>(content.get()) != one->key) others.push_back(content);
          maker->keep(std::move(others));
        }
        if (!ledger_.backend.has(reader) && pending.size() < FARTHEST) pending.emplace_back(reader, 0);
      });
    }
  }

  // Called when the output of an operation is in memory again, so that its inputs need no longer be kept.
  void came_back(Recorded* maker) {
    if (maker->held && !maker->held->kept_inputs.empty()) came_back_.emplace_back(OperationRef(maker), maker->held->times_kept);
  }
  // Releases these inputs. Called when no rematerialization that may read them is in progress. An output that was evicted again
  // meanwhile has a new set of kept inputs, which stays.
  void release_kept_inputs() {
    if (came_back_.empty()) return;
    for (auto& [maker, times_kept] : std::exchange(came_back_, {}))
      if (maker->held->times_kept == times_kept) maker->keep({});
    ledger_.collect_dead();
  }

  // -- scratch: recomputed storages that the program does not have --

  // Called when an operation has read a scratch version that is no longer locked. others: whether other recipes may read it. If
  // not, it was recomputed for that operation alone and is freed at once (App. C.4).
  void was_read(Version* one, bool others) {
    if (others) {  // keep it until memory runs short
      if (ledger_.pressure) ledger_.policy->insert(one);
    } else {
      drop(one);
    }
  }

  // Keeps scratch versions up to a fraction of the budget, dropping the oldest. The paper keeps all of them (App. C.4), but on an
  // LSTM at 40 % of its peak they displaced what the program was about to use, and the step did not end. Keeping none recomputes
  // more.
  void cap_scratch() {
    if (ledger_.scratch.size() == 0) return;
    int64_t allowed = ledger_.budget_bytes < 0 ? 0 : ledger_.limit >> scratch_shift;
    if (ledger_.scratch_bytes <= allowed) return;
    int64_t excess = -allowed;
    auto is_idle = [&](const Version* one) { return one->locks == 0 && one->device == ledger_.device; };
    ledger_.scratch.each([&](const Version* one) { excess += is_idle(one) ? one->nbytes : 0; });
    if (excess <= 0) return;
    for (const VersionRef& one : ledger_.scratch.all()) {
      if (!is_idle(one.get())) continue;
      excess -= one->nbytes;
      drop(one.get());
      if (excess <= 0) return;
    }
  }

  // Frees the scratch versions that no recipe reads any more, provided that there have been enough evictions since the last time.
  // Returns whether that was so. evictions: the number so far.
  bool free_unread_scratch(int64_t evictions) {
    auto size = static_cast<int64_t>(ledger_.scratch.size());
    if (size == 0 || evictions - last_freed_ < size >> 4) return false;
    free_all_unread_scratch(evictions + 1);
    return true;
  }
  void free_all_unread_scratch(int64_t evictions) {
    last_freed_ = evictions;
    std::vector<VersionRef> all = ledger_.scratch.all();
    for (auto one = all.rbegin(); one != all.rend(); ++one) {
      if ((*one)->locks != 0 || (*one)->readers != 0 || !ledger_.scratch.has(one->get())) continue;
      ledger_.policy->discard(one->get());
      ledger_.drop_scratch(one->get());
      *one = VersionRef();
    }
  }

 private:
  void drop(Version* one) {
    VersionRef kept(one);
    ledger_.drop_scratch(one);
    ledger_.policy->released(one);
  }
  // Returns the storages of the inputs that `keep_inputs` keeps.
  std::vector<StorageRef> dear_inputs(Version* one) {
    using Wide = __int128;
    std::vector<StorageRef> found;
    int64_t search = next_search();
    auto& pending = pending_;
    pending.assign(1, {one, one->cost});  // each with the cost from there to `one`
    for (size_t i = 0; i < pending.size(); i++) {
      auto [node, cost] = pending[i];
      for (Node* read : node->inputs()) {
        Version* source = as_version(read);
        if (source->constant() || !newly_seen(source, search)) continue;
        if (source->resident && !source->scratch) {
          if (Wide{ledger_.policy->projected_cost(source)} * one->nbytes <= Wide{kept} * cost * source->nbytes) continue;
          if (StorageRef content = ledger_.backend.storage_of(source)) found.push_back(std::move(content));
        } else if (!ledger_.backend.has(source) && pending.size() < FARTHEST) {
          pending.emplace_back(source, cost + source->cost);
        }
      }
    }
    return found;
  }

  Ledger& ledger_;
  std::vector<std::pair<Version*, int64_t>> pending_;  // of a search, kept for their memory
  int64_t last_freed_ = 0;  // number of evictions when unread scratch was last freed, plus one if by `free_unread_scratch`
  std::vector<std::pair<OperationRef, int64_t>> came_back_;  // replayed operations, with `times_kept` at that time
};

}  // namespace dtrrun
