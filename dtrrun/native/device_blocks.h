// The blocks of a GPU's caching allocator, by address, and the cheapest window of neighbours to evict.
//
// If a request fails although enough bytes are free in total, more free bytes elsewhere do not help: they must be contiguous (as in
// Coop and MegEngine). So of all windows of neighbouring blocks that are free or can be evicted, and are large enough, the one is
// evicted whose blocks have the least sum of scores times sizes. Neighbours in memory are often computed from one another: by their
// own costs alone, window after window would be evicted until a rematerialization has to compute hundreds of operations at once.
//
// The allocator calls trace trackers with each block that it hands out or gets back, and with what it maps and unmaps, while it is
// locked (`attachAllocatorTraceTracker`, which NCCL's process groups use as well). So a snapshot, which takes milliseconds, is
// needed only to begin with. For each block, this takes 0.1 µs.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "meter.h"
#include "stored_versions.h"

namespace dtrrun {

// A block in a pool of the allocator, or the end of a segment (of 0 bytes).
struct DeviceBlock {
  uintptr_t address;
  size_t nbytes;
  bool free;

  bool operator==(const DeviceBlock& other) const {
    return address == other.address && nbytes == other.nbytes && free == other.free;
  }
};
using BlockList = std::vector<DeviceBlock>;

class DeviceBlocks {
 public:
  static constexpr size_t SMALL = size_t{1} << 20;  // kSmallSize: the largest request for which the small pool is used

  // Of PyTorch's snapshot.
  struct Segment {
    uintptr_t address;
    size_t nbytes;
    bool small, expandable;
    bool ours;  // it serves requests on the program's stream: it belongs to no private pool
  };
  struct Block {
    uintptr_t address;
    size_t nbytes, requested;
    bool free;
  };

  // The process-wide instance, never destroyed: the allocator keeps its tracker.
  static DeviceBlocks& own() {
    static DeviceBlocks& blocks = *new DeviceBlocks();
    return blocks;
  }

  // Begins to listen to what the allocator says of one of this many devices. A snapshot must follow, then `start`.
  void prepare(int device, int devices) {
    std::lock_guard<std::mutex> guard(mutex_);
    device_ = device;
    devices_ = devices;
    snapshots_ = 0;
    waiting_.clear();
    state_ = State::WAITS;
  }
  // Takes over that snapshot. Returns false if it can't be followed: the allocator rounds sizes in a way of its own, or does not
  // tell of its blocks.
  bool start(const std::vector<std::pair<Segment, std::vector<Block>>>& snapshot) {
    std::lock_guard<std::mutex> guard(mutex_);
    segments_.clear();
    for (bool small : {false, true}) {
      taken_[small].clear();
      changes_[small].clear();
    }
    reserved_ = 0;
    BlockList seen[2];
    for (const auto& [segment, blocks] : snapshot) {
      reserved_ += segment.nbytes;
      if (!segment.ours) continue;
      for (const Block& one : blocks) {
        if (!one.free) changes_[segment.small].push_back({one.address, rounded(one.requested)});
        seen[segment.small].push_back({one.address, one.nbytes, one.free});
      }
      segments_[segment.address] = {segment.nbytes, segment.small, segment.expandable};
      seen[segment.small].push_back({segment.address + segment.nbytes, 0, false});
    }
    bool same = snapshots_ > device_ && snapshots_ <= devices_;  // this snapshot, and no other
    for (bool small : {false, true}) same = same && list(small) == seen[small];
    for (const Event& one : waiting_) apply(one);
    waiting_.clear();
    state_ = same ? State::FOLLOWS : State::OFF;
    return same;
  }
  void stop() { state_ = State::OFF; }
  bool follows() const { return state_ == State::FOLLOWS; }

  // Returns the bytes of all segments.
  size_t reserved_bytes() {
    std::lock_guard<std::mutex> guard(mutex_);
    return reserved_;
  }
  // Returns the bytes of those pages that the allocator would return to the driver if it flushed.
  size_t returnable_bytes() {
    std::lock_guard<std::mutex> guard(mutex_);
    size_t found = 0;
    for (bool small : {false, true}) {
      each(small, [&](uintptr_t begin, const Range& segment, const DeviceBlock& block) {
        if (!block.free) return;
        size_t page = !segment.expandable ? segment.nbytes : small ? SMALL_PAGE : PAGE;
        uintptr_t first = (block.address - begin + page - 1) / page, last = (block.address + block.nbytes - begin) / page;
        if (last > first) found += (last - first) * page;
      });
    }
    return found;
  }
  // Returns the blocks that can serve a request of that size on the program's stream, by address.
  BlockList serving(size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    return list(nbytes <= SMALL);
  }

  // The beginning of PyTorch's `TraceEntry`, whose header needs CUDA's.
  struct Told {
    enum Action { ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT };
    int action;
    c10::DeviceIndex device;
    size_t address;
    std::shared_ptr<void> context;
    void* stream;
    size_t nbytes;
    std::pair<unsigned long long, unsigned long long> pool;
  };
  using Tracker = std::function<void(const Told&)>;

  void tell(const Told& told) {
    if (Meter* meter = Meter::innermost) {
      if (told.action == Told::ALLOC) meter->taken(told.address, static_cast<int64_t>(rounded(told.nbytes)));
      if (told.action == Told::FREE_COMPLETED) meter->freed(told.address);
    }
    if (state_.load(std::memory_order_relaxed) == State::OFF || told.action == Told::FREE_REQUESTED) return;
    if (told.device != device_.load(std::memory_order_relaxed) && told.action != Told::SNAPSHOT) return;
    std::lock_guard<std::mutex> guard(mutex_);
    Event one{told.action, told.address, told.nbytes, told.stream == nullptr && told.pool.first == 0 && told.pool.second == 0};
    if (state_ == State::FOLLOWS) return apply(one);
    if (one.action != Told::SNAPSHOT) return waiting_.push_back(one);
    // One for each device, in order, all of which name the first device.
    if (snapshots_++ == device_) waiting_.clear();  // what came before is in it
  }

 private:
  enum class State { OFF, WAITS, FOLLOWS };
  struct Event {
    int action;
    uintptr_t address;
    size_t nbytes;
    bool ours;
  };
  struct Range {
    size_t nbytes;
    bool small, expandable;
  };
  static constexpr size_t UNIT = 512, SMALL_PAGE = size_t{2} << 20, PAGE = size_t{20} << 20;
  static constexpr size_t UNSPLIT = size_t{1} << 20;  // such ends stay with their blocks where segments can't grow
  static constexpr size_t MANY = 1 << 14;  // changes that are kept until blocks are asked for

  DeviceBlocks() = default;

  static size_t rounded(size_t nbytes) { return std::max((nbytes + UNIT - 1) & -UNIT, UNIT); }

  void apply(const Event& one) {
    switch (one.action) {
      case Told::ALLOC:
        if (one.ours) changed(one.nbytes <= SMALL, {one.address, rounded(one.nbytes)});
        break;
      case Told::FREE_COMPLETED:
        if (one.ours) changed(one.nbytes <= SMALL, {one.address, 0});
        break;
      case Told::SEGMENT_ALLOC:
      case Told::SEGMENT_MAP:
        reserved_ += one.nbytes;
        if (one.ours) add(one.address, {one.nbytes, one.nbytes == SMALL_PAGE, one.action == Told::SEGMENT_MAP});
        break;
      case Told::SEGMENT_FREE:
      case Told::SEGMENT_UNMAP:
        reserved_ -= one.nbytes;
        if (one.ours) cut(one.address, one.nbytes);
        break;
      default: break;
    }
  }
  // Adds what has been mapped. Expandable segments grow in both directions.
  void add(uintptr_t address, Range range) {
    auto next = segments_.lower_bound(address);
    auto joins = [&](const Range& other) { return range.expandable && other.expandable && other.small == range.small; };
    if (next != segments_.end() && next->first == address + range.nbytes && joins(next->second)) {
      range.nbytes += next->second.nbytes;
      next = segments_.erase(next);
    }
    if (next != segments_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second.nbytes == address && joins(before->second)) {
        before->second.nbytes += range.nbytes;
        return;
      }
    }
    segments_.emplace(address, range);
  }
  void cut(uintptr_t address, size_t nbytes) {
    auto found = segments_.upper_bound(address);
    if (found == segments_.begin()) return;
    --found;
    auto [begin, range] = *found;
    uintptr_t end = begin + range.nbytes;
    if (address + nbytes > end) return;
    segments_.erase(found);
    if (address > begin) segments_.emplace(begin, Range{address - begin, range.small, range.expandable});
    if (address + nbytes < end) segments_.emplace(address + nbytes, Range{end - address - nbytes, range.small, range.expandable});
  }

  struct Taken {
    uintptr_t address;
    size_t nbytes;  // 0: it has been freed
  };
  void changed(bool small, Taken one) {
    changes_[small].push_back(one);
    if (changes_[small].size() >= MANY) settle(small);
  }
  // Merges what has changed into the blocks in use.
  void settle(bool small) {
    std::vector<Taken>&changes = changes_[small], &taken = taken_[small], merged;
    if (changes.empty()) return;
    std::stable_sort(changes.begin(), changes.end(), [](const Taken& a, const Taken& b) { return a.address < b.address; });
    merged.reserve(taken.size() + changes.size());
    auto known = taken.begin();
    for (auto one = changes.begin(); one != changes.end(); ++one) {
      if (std::next(one) != changes.end() && std::next(one)->address == one->address) continue;
      for (; known != taken.end() && known->address < one->address; ++known) merged.push_back(*known);
      if (known != taken.end() && known->address == one->address) ++known;
      if (one->nbytes != 0) merged.push_back(*one);
    }
    merged.insert(merged.end(), known, taken.end());
    taken = std::move(merged);
    changes.clear();
  }

  // Calls function(address of the segment, segment, block) with each block of a pool, by address, and at each segment's end.
  template <class Function>
  void each(bool small, const Function& function) {
    settle(small);
    auto next = taken_[small].begin(), last = taken_[small].end();
    for (const auto& [begin, segment] : segments_) {
      if (segment.small != small) continue;
      uintptr_t place = begin, end = begin + segment.nbytes;
      while (next != last && next->address < begin) ++next;
      while (next != last && next->address < end) {
        uintptr_t address = next->address, until = address + next->nbytes;
        ++next;
        uintptr_t following = next != last && next->address < end ? next->address : end;
        if (!small && !segment.expandable && following - until <= UNSPLIT) until = following;
        if (address != place) function(begin, segment, DeviceBlock{place, address - place, true});
        function(begin, segment, DeviceBlock{address, until - address, false});
        place = until;
      }
      if (place != end) function(begin, segment, DeviceBlock{place, end - place, true});
      function(begin, segment, DeviceBlock{end, 0, false});
    }
  }
  BlockList list(bool small) {
    BlockList found;
    found.reserve(2 * (taken_[small].size() + changes_[small].size()) + 2 * segments_.size());
    each(small, [&](uintptr_t, const Range&, const DeviceBlock& block) { found.push_back(block); });
    return found;
  }

  std::mutex mutex_;
  std::atomic<State> state_{State::OFF};
  std::atomic<int> device_{-1};
  int devices_ = 0, snapshots_ = 0;  // of devices, since `prepare`
  std::vector<Event> waiting_;  // since the snapshot
  std::map<uintptr_t, Range> segments_;  // what is mapped for the program's stream
  // Large and small blocks in use there, by address, and what has changed since.
  std::vector<Taken> taken_[2], changes_[2];
  size_t reserved_ = 0;  // of all streams and pools
};

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
