// The blocks of a GPU's caching allocator, by address.
//
// The allocator calls trace trackers with each block that it hands out or gets back, and with what it maps and unmaps, while it is
// locked (`attachAllocatorTraceTracker`, which NCCL's process groups use as well). So a snapshot, which takes milliseconds, is
// needed only to begin with. For each block, this takes 0.1 µs.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "meter.h"

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
  // Calls function(block) with those that can serve a request of that size on the program's stream, by address, and at the end of
  // each segment. Meanwhile, nothing may be allocated.
  template <class Function>
  void each_serving(size_t nbytes, const Function& function) {
    std::lock_guard<std::mutex> guard(mutex_);
    each(nbytes <= SMALL, [&](uintptr_t, const Range&, const DeviceBlock& block) { function(block); });
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
    std::vector<Taken>&changes = changes_[small], &taken = taken_[small];
    if (changes.empty()) return;
    auto is_before = [](const Taken& a, const Taken& b) { return a.address < b.address; };
    std::stable_sort(changes.begin(), changes.end(), is_before);
    merged_.clear();
    auto known = taken.begin();
    for (auto one = changes.begin(); one != changes.end(); ++one) {
      if (std::next(one) != changes.end() && std::next(one)->address == one->address) continue;
      auto place = std::lower_bound(known, taken.end(), *one, is_before);
      merged_.insert(merged_.end(), known, place);
      known = place;
      if (known != taken.end() && known->address == one->address) ++known;
      if (one->nbytes != 0) merged_.push_back(*one);
    }
    merged_.insert(merged_.end(), known, taken.end());
    std::swap(taken, merged_);
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
      bool has_ends = !small && !segment.expandable;
      while (next != last && next->address < begin) ++next;
      while (next != last && next->address < end) {
        uintptr_t address = next->address, until = address + next->nbytes;
        ++next;
        if (has_ends) {
          uintptr_t following = next != last && next->address < end ? next->address : end;
          if (following - until <= UNSPLIT) until = following;
        }
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
  std::vector<Taken> merged_;  // kept for its memory
  size_t reserved_ = 0;  // of all streams and pools
};

}  // namespace dtrrun
