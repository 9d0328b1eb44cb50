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
  // Begins to search for windows of so many contiguous bytes.
  void begin(const Core& core, const BlockList& blocks, int64_t wanted) {
    begun_++;
    find_costs(core, blocks);
    find_windows(blocks, wanted);
    std::make_heap(windows_.begin(), windows_.end());
  }
  // Returns the versions to evict for the cheapest window that has no block of those returned before; none if there is no such
  // window, or it is free. Of several that cost the same, the first one is taken.
  std::vector<VersionRef> next(const Core& core, const BlockList& blocks) {
    while (!windows_.empty()) {
      std::pop_heap(windows_.begin(), windows_.end());
      Window window = windows_.back();
      windows_.pop_back();
      if (window.exact && !is_taken(window)) return take(blocks, window);
      price(core, blocks, window);
      if (window.price == NEVER_GOES) continue;
      windows_.push_back(window);
      std::push_heap(windows_.begin(), windows_.end());
    }
    return {};
  }
  // Returns how many searches have begun: `next` belongs to the last one.
  int64_t begun() const { return begun_; }

 private:
  static constexpr double NEVER_GOES = std::numeric_limits<double>::infinity();

  struct Cost {
    double price;  // or a lower bound of it
    Priced* bound;  // null: the price is exact
    Version* one;  // known once the price is exact
  };
  struct Window {
    double price;  // or a lower bound of it
    size_t first, last;
    bool exact;
    bool operator<(const Window& other) const {  // reversed, so that the cheapest is on top of a heap
      return price != other.price ? price > other.price : last > other.last;
    }
  };

  static uintptr_t address_of(const Core& core, const Version* one) {
    StorageRef storage = core.ledger.memory_of(one);
    return storage ? reinterpret_cast<uintptr_t>(as_impl(storage)->data()) : 0;
  }

  void find_costs(const Core& core, const BlockList& blocks) {
    Prices& prices = core.ledger.policy->prices();
    std::vector<Priced>& priced = prices.all([&](Node* node) { return address_of(core, as_version(node)); });
    std::vector<std::pair<uintptr_t, Version*>> leaving;
    core.eviction.each_that_may_leave([&](Version* one) { leaving.emplace_back(address_of(core, one), one); });
    std::sort(leaving.begin(), leaving.end());
    costs_.resize(blocks.size());
    auto bound = priced.begin();
    uintptr_t before = 0;
    for (size_t place = 0; place < blocks.size(); place++) {
      const DeviceBlock& block = blocks[place];
      Cost& cost = costs_[place] = {block.free ? 0 : NEVER_GOES, nullptr, nullptr};
      if (block.free || block.nbytes == 0) continue;
      if (block.address < before) bound = priced.begin();  // segments need not be in order
      before = block.address;
      while (bound != priced.end() && bound->address < block.address) ++bound;
      if (bound != priced.end() && bound->address == block.address) {
        cost.price = prices.at_least(*bound, core.ledger.clock);
        cost.bound = &*bound;
        continue;
      }
      auto found = std::lower_bound(leaving.begin(), leaving.end(), std::pair<uintptr_t, Version*>{block.address, nullptr});
      if (found == leaving.end() || found->first != block.address) continue;
      cost.price = core.eviction.price_of_leaving(found->second);
      cost.one = found->second;
    }
  }

  // Prices are only added up: each window's is the sum of what precedes `middle` and of what follows it.
  void find_windows(const BlockList& blocks, int64_t wanted) {
    windows_.clear();
    sums_.resize(blocks.size());
    size_t first = 0, middle = 0;
    int64_t nbytes = 0;
    double behind = 0;
    for (size_t place = 0; place < blocks.size(); place++) {
      if (costs_[place].price == NEVER_GOES) {
        first = middle = place + 1;
        nbytes = 0;
        behind = 0;
        continue;
      }
      nbytes += static_cast<int64_t>(blocks[place].nbytes);
      behind += costs_[place].price;
      while (nbytes - static_cast<int64_t>(blocks[first].nbytes) >= wanted)
        nbytes -= static_cast<int64_t>(blocks[first++].nbytes);
      if (nbytes < wanted) continue;
      if (first >= middle) {
        double sum = 0;
        for (size_t one = place + 1; one-- > first;) sums_[one] = sum += costs_[one].price;
        middle = place + 1;
        behind = 0;
      }
      windows_.push_back({(sums_[first] + behind) * Search::ROUNDING, first, place, false});
    }
  }

  // Computes a window's price, or at least the price of one more block in it.
  void price(const Core& core, const BlockList& blocks, Window& window) {
    Prices& prices = core.ledger.policy->prices();
    double cheapest = windows_.empty() ? NEVER_GOES : windows_.front().price;
    window.exact = true;
    window.price = 0;
    for (size_t place = window.first; place <= window.last; place++) {
      Cost& cost = costs_[place];
      if (cost.bound != nullptr && window.price > cheapest) window.exact = false;
      if (cost.bound != nullptr && window.exact) {
        Priced& bound = *std::exchange(cost.bound, nullptr);
        Version* one = as_version(prices.node_of(bound));
        bool goes = one != nullptr && one->resident && !one->constant() && one->locks == 0 &&
                    address_of(core, one) == blocks[place].address;
        cost.price = goes ? prices.exact(bound, core.ledger.clock) : NEVER_GOES;
        cost.one = one;
      }
      window.price += cost.price;
    }
    if (!window.exact) window.price *= Search::ROUNDING;
  }

  bool is_taken(const Window& window) const {
    for (size_t place = window.first; place <= window.last; place++)
      if (costs_[place].price == NEVER_GOES) return true;
    return false;
  }
  std::vector<VersionRef> take(const BlockList& blocks, const Window& window) {
    std::vector<VersionRef> found;
    for (size_t place = window.first; place <= window.last; place++) {
      if (!blocks[place].free) found.emplace_back(costs_[place].one);
      costs_[place].price = NEVER_GOES;
    }
    return found;
  }

  // Kept between searches for their memory.
  std::vector<Cost> costs_;  // by block
  std::vector<double> sums_;
  std::vector<Window> windows_;  // a heap
  int64_t begun_ = 0;
};

// Evicts the cheapest window of neighbouring blocks for `wanted` contiguous bytes. at_most: leave them if bringing them back costs
// more ns, or -1. Returns whether there is such a window, and all of it could be evicted.
//
// A search takes as long as there are blocks. Where there are thousands, the next windows cost about as little, and the next
// requests need them: they are evicted as well, instead of searching again.
inline bool evict_window(Core& core, const BlockList& blocks, int64_t wanted, int64_t at_most) {
  constexpr size_t BLOCKS_EACH = 2048;
  core.eviction.begin_pressure();
  static thread_local WindowSearch search;
  search.begin(core, blocks, wanted);
  int64_t begun = search.begun();
  for (size_t windows = 0; windows <= blocks.size() / BLOCKS_EACH; windows++) {
    if (search.begun() != begun) break;  // within an eviction
    std::vector<VersionRef> window = search.next(core, blocks);
    if (window.empty() || (at_most >= 0 && !is_cheap(core, window, at_most))) return windows != 0;
    for (const VersionRef& one : window)
      if (!core.eviction.evict_if_possible(one.get())) return windows != 0;
  }
  return true;
}

}  // namespace dtrrun
