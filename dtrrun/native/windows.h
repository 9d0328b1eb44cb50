// The cheapest window of neighbouring blocks to evict for a request.
//
// If a request fails although enough bytes are free in total, more free bytes elsewhere do not help: they must be contiguous (as in
// Coop and MegEngine). So of all windows of neighbouring blocks that are free or can be evicted, and are large enough, the one is
// evicted whose blocks have the least sum of scores times sizes. Neighbours in memory are often computed from one another: by their
// own costs alone, window after window would be evicted until a rematerialization has to compute hundreds of operations at once.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "device_blocks.h"
#include "stored_versions.h"

namespace dtrrun {

// Returns whether bringing these versions back costs at most so many ns if they were all evicted now, with the evicted ones that
// they need.
inline bool is_cheap(const Core& core, const std::vector<VersionRef>& versions, int64_t at_most) {
  ska::flat_hash_set<const Version*> seen;
  std::vector<const Version*> pending;
  for (const VersionRef& one : versions) {
    seen.insert(one.get());
    pending.push_back(one.get());
  }
  int64_t cost = 0;
  while (!pending.empty() && cost <= at_most) {
    const Version* one = pending.back();
    pending.pop_back();
    int64_t copy = one->constant() || one->has_left() ? core.eviction.cost_of_leaving(one) : core.eviction.cost_of_copy(one);
    cost += one->constant() ? copy : std::min(one->cost, copy);
    if (copy <= one->cost) continue;
    for (const Node* read : one->inputs()) {
      const Version* source = as_version(read);
      if (!source->resident && !source->constant() && seen.insert(source).second) pending.push_back(source);
    }
  }
  return cost <= at_most;
}

// Finds the cheapest window of neighbouring blocks that are free or can be evicted.
//
// For each block, there is at most one window that ends there: the shortest that is large enough. Their prices are first summed up
// from lower bounds (core/policy/prices.h), and computed only of those windows that may be the cheapest. The policy has the prices
// of all devices. Those of others match none of the blocks, whose addresses they do not share.
class WindowSearch {
 public:
  // That of this thread, which keeps its memory between searches.
  static WindowSearch& own() {
    static thread_local WindowSearch search;
    return search;
  }

  // Begins to search for windows of so many contiguous bytes. each_block: calls a function with each `DeviceBlock`.
  template <class Blocks>
  void begin(const Core& core, int64_t wanted, const Blocks& each_block) {
    begun_++;
    blocks_.clear();
    windows_.clear();
    Priceable priceable(core);
    Run run;
    Block free{};  // the last one that was met, unless a run has begun with it or it is followed by a block that stays
    int64_t met = 0;
    auto add = [&](const Block& block) {
      if (!run.is_open && free.nbytes != 0) enter(free, run, wanted);
      enter(block, run, wanted);
    };
    each_block([&](const DeviceBlock& one) {  // of which most may have to stay
      met++;
      auto nbytes = static_cast<int64_t>(one.nbytes);
      if (one.free) {
        Block block{one.address, nbytes, 0, 0, nullptr, nullptr};
        if (run.is_open || free.nbytes != 0 || nbytes >= wanted)
          add(block);
        else
          free = block;
      } else if (nbytes != 0 && priceable.has(one.address)) {
        add(priceable.priced(one.address, nbytes));
      } else {
        if (run.is_open) end(run, wanted);
        free.nbytes = 0;
      }
    });
    met_ = met;
    std::make_heap(windows_.begin(), windows_.end());
  }
  // Returns the versions to evict for the cheapest window that has no block of those returned before; none if there is no such
  // window, or it is free. Of several that cost the same, the first one is taken.
  std::vector<VersionRef> next(const Core& core) {
    while (!windows_.empty()) {
      std::pop_heap(windows_.begin(), windows_.end());
      Window window = windows_.back();
      windows_.pop_back();
      if (window.exact && !is_taken(window)) return take(window);
      price(core, window);
      if (window.price == NEVER_GOES) continue;
      windows_.push_back(window);
      std::push_heap(windows_.begin(), windows_.end());
    }
    return {};
  }
  // Returns how many searches have begun: `next` belongs to the last one.
  int64_t begun() const { return begun_; }
  // Returns how many blocks there are, and ends of segments.
  int64_t met() const { return met_; }

 private:
  static constexpr double NEVER_GOES = std::numeric_limits<double>::infinity();

  // One that is free, or may be evicted.
  struct Block {
    uintptr_t address;
    int64_t nbytes;
    double price;  // or a lower bound of it
    double sum;  // see `enter`
    Priced* bound;  // null: the price is exact
    Version* one;  // known once the price is exact; null if the block is free
  };
  struct Window {
    double price;  // or a lower bound of it
    size_t first, last;
    bool exact;
    bool operator<(const Window& other) const {  // reversed, so that the cheapest is on top of a heap
      return price != other.price ? price > other.price : last > other.last;
    }
  };
  // Neighbours that are free or may be evicted, from `begin` on.
  struct Run {
    bool is_open = false;
    size_t begin = 0, first = 0, middle = 0;
    int64_t nbytes = 0;
    double behind = 0;
  };

  // What may be evicted, with its prices.
  class Priceable {
   public:
    explicit Priceable(const Core& core)
        : core_(core), prices_(core.ledger.policy->prices()),
          bounds_(prices_.all([&](Node* node) { return address_of(core, as_version(node)); })), clock_(core.ledger.clock) {
      begin();
      core.eviction.each_that_may_leave([&](Version* one) { leaving_.emplace_back(address_of(core, one), one); },
                                        [](const Version*) { return true; });
      std::sort(leaving_.begin(), leaving_.end());
    }
    // Returns whether the block at this address may be evicted.
    bool has(uintptr_t address) {
      if (address < before_) begin();  // segments need not be in order
      before_ = address;
      if (address < upcoming_) return !leaving_.empty() && find(address) != leaving_.end();
      for (; upcoming_ < address; look()) next_++;
      return upcoming_ == address || (!leaving_.empty() && find(address) != leaving_.end());
    }
    // Returns that block.
    Block priced(uintptr_t address, int64_t nbytes) {
      if (upcoming_ == address) return {address, nbytes, prices_.at_least(*next_, clock_), 0, next_, nullptr};
      Version* one = find(address)->second;
      return {address, nbytes, core_.eviction.price_of_leaving(one), 0, nullptr, one};
    }

   private:
    void begin() {
      next_ = bounds_.data();
      look();
    }
    void look() { upcoming_ = next_ != bounds_.data() + bounds_.size() ? next_->address : UINTPTR_MAX; }
    std::vector<std::pair<uintptr_t, Version*>>::iterator find(uintptr_t address) {
      auto found = std::lower_bound(leaving_.begin(), leaving_.end(), std::pair<uintptr_t, Version*>{address, nullptr});
      return found != leaving_.end() && found->first == address ? found : leaving_.end();
    }

    const Core& core_;
    Prices& prices_;
    std::vector<Priced>& bounds_;
    const int64_t clock_;
    Priced* next_;
    uintptr_t upcoming_, before_ = 0;  // the address of `next_`, and the one that was asked for last
    std::vector<std::pair<uintptr_t, Version*>> leaving_;
  };

  static uintptr_t address_of(const Core& core, const Version* one) {
    StorageRef storage = core.ledger.memory_of(one);
    return storage ? reinterpret_cast<uintptr_t>(as_impl(storage)->data()) : 0;
  }

  // Adds a block to a run, and the window that ends with it. Prices are only added up: each window's is the sum of what precedes
  // `middle`, from its first block on (`Block::sum`), and of what follows it (`Run::behind`).
  void enter(const Block& block, Run& run, int64_t wanted) {
    size_t place = blocks_.size();
    run.is_open = true;
    blocks_.push_back(block);
    run.nbytes += block.nbytes;
    run.behind += block.price;
    if (run.nbytes < wanted) return;
    while (run.nbytes - blocks_[run.first].nbytes >= wanted) run.nbytes -= blocks_[run.first++].nbytes;
    if (run.first >= run.middle) {
      double sum = 0;
      for (size_t one = place + 1; one-- > run.first;) blocks_[one].sum = sum += blocks_[one].price;
      run.middle = place + 1;
      run.behind = 0;
    }
    windows_.push_back({(blocks_[run.first].sum + run.behind) * Search::ROUNDING, run.first, place, false});
  }
  // Ends a run. If it has no window, its blocks are forgotten.
  void end(Run& run, int64_t wanted) {
    if (run.nbytes < wanted) blocks_.resize(run.begin);
    run = {};
    run.begin = run.first = run.middle = blocks_.size();
  }

  // Computes a window's price, or at least the price of one more block in it.
  void price(const Core& core, Window& window) {
    Prices& prices = core.ledger.policy->prices();
    double cheapest = windows_.empty() ? NEVER_GOES : windows_.front().price;
    window.exact = true;
    window.price = 0;
    for (size_t place = window.first; place <= window.last; place++) {
      Block& block = blocks_[place];
      if (block.bound != nullptr && window.price > cheapest) window.exact = false;
      if (block.bound != nullptr && window.exact) {
        Priced& bound = *std::exchange(block.bound, nullptr);
        Version* one = as_version(prices.node_of(bound));
        bool goes =
            one != nullptr && one->resident && !one->constant() && one->locks == 0 && address_of(core, one) == block.address;
        block.price = goes ? prices.exact(bound, core.ledger.clock) : NEVER_GOES;
        block.one = one;
      }
      window.price += block.price;
    }
    if (!window.exact) window.price *= Search::ROUNDING;
  }

  bool is_taken(const Window& window) const {
    for (size_t place = window.first; place <= window.last; place++)
      if (blocks_[place].price == NEVER_GOES) return true;
    return false;
  }
  std::vector<VersionRef> take(const Window& window) {
    std::vector<VersionRef> found;
    for (size_t place = window.first; place <= window.last; place++) {
      if (Version* one = blocks_[place].one) found.emplace_back(one);
      blocks_[place].price = NEVER_GOES;
    }
    return found;
  }

  std::vector<Block> blocks_;  // of runs, one after the other
  std::vector<Window> windows_;  // a heap
  int64_t begun_ = 0, met_ = 0;
};

// Evicts the cheapest window of neighbouring blocks for `wanted` contiguous bytes. at_most: leave them if bringing them back costs
// more ns, or -1. Returns whether there is such a window, and all of it could be evicted.
//
// A search takes as long as there are blocks. Where there are thousands, the next windows cost about as little, and the next
// requests need them: they are evicted as well, instead of searching again.
template <class Blocks>
bool evict_window(Core& core, int64_t wanted, int64_t at_most, const Blocks& each_block) {
  constexpr int64_t BLOCKS_EACH = 2048;
  core.eviction.begin_pressure();
  WindowSearch& search = WindowSearch::own();
  search.begin(core, wanted, each_block);
  int64_t begun = search.begun(), met = search.met();
  for (int64_t windows = 0; windows <= met / BLOCKS_EACH; windows++) {
    if (search.begun() != begun) break;  // within an eviction
    std::vector<VersionRef> window = search.next(core);
    if (window.empty() || (at_most >= 0 && !is_cheap(core, window, at_most))) return windows != 0;
    for (const VersionRef& one : window)
      if (!core.eviction.evict_if_possible(one.get())) return windows != 0;
  }
  return true;
}

}  // namespace dtrrun
