// An arena for large blocks, which decides itself which free pages to return to the system.
//
// A free range is warm while it has pages, and cold once they have been returned to the system. The system clears a page, at
// the cost of a page fault, before it hands it out again. So a block is taken from the smallest warm range that can hold it, or
// else from the free space with the most warm bytes. Blocks and warm ranges together stay within a cap, unless the blocks alone
// exceed it: the ranges that have been free for longest become cold.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace dtrrun {

// Callers must lock it, except for `has`.
class Arena {
 public:
  static constexpr size_t ALIGNMENT = 64;  // as in PyTorch's own allocator

  // In bytes.
  struct Figures {
    size_t taken = 0;     // blocks
    size_t warm = 0;      // free, and not returned
    size_t cleared = 0;   // by the system, for blocks, since the beginning
    size_t returned = 0;  // to the system, since the beginning
    size_t most = 0;      // blocks at once, since the last `count_anew`
  };

  Arena() = default;
  Arena(const Arena&) = delete;

  // Returns true if a block is in this arena.
  bool has(const void* block) const {
    auto place = reinterpret_cast<uintptr_t>(block);
    for (size_t i = 0, count = count_.load(std::memory_order_acquire); i < count; i++)
      if (place >= segments_[i].first && place < segments_[i].second) return true;
    return false;
  }

  // Returns a block of at least `nbytes`, or null if the system has no room.
  void* take(size_t nbytes) {
    if (nbytes > SIZE_MAX / 2) return nullptr;
    nbytes = (nbytes + ALIGNMENT - 1) & -ALIGNMENT;
    uintptr_t place = find(nbytes);
    if (place == 0 && map(nbytes)) place = find(nbytes);
    if (place == 0) return nullptr;
    cut(place, place + nbytes);
    taken_.emplace(place, nbytes);
    figures_.taken += nbytes;
    figures_.most = std::max(figures_.most, figures_.taken);
    keep_to_cap();
    return reinterpret_cast<void*>(place);
  }

  void give_back(void* address) {
    auto found = taken_.find(reinterpret_cast<uintptr_t>(address));
    auto [place, nbytes] = *found;
    taken_.erase(found);
    figures_.taken -= nbytes;
    add(place, nbytes, /*warm=*/true);
    keep_to_cap();
  }

  void set_cap(size_t nbytes) {
    cap_ = nbytes;
    keep_to_cap();
  }

  // Returns true if the system limits this process's memory.
  static bool is_limited() { return limit_of(RLIMIT_DATA) != RLIM_INFINITY || limit_of(RLIMIT_AS) != RLIM_INFINITY; }

  const Figures& figures() const { return figures_; }
  void count_anew() { figures_.most = figures_.taken; }

 private:
  using BySize = std::set<std::pair<size_t, uintptr_t>>;
  struct Range {
    size_t nbytes;
    bool warm;
    uint64_t since;  // when it became free, by `clock_`
  };
  using Ranges = std::map<uintptr_t, Range>;

  // Returns where a block goes, or 0 if there is no room for it.
  uintptr_t find(size_t nbytes) {
    if (auto fits = warm_.lower_bound({nbytes, 0}); fits != warm_.end()) return fits->second;
    if (uintptr_t place = mostly_warm(nbytes); place != 0) return place;
    auto fits = cold_.lower_bound({nbytes, 0});
    return fits == cold_.end() ? 0 : fits->second;
  }

  // Adds a segment of address space, as large as all others together. Returns false if the system has none. Near the system's
  // limit (`ulimit -d`), the segment is small, since unused pages count as well. Some memory is left to others: a library
  // without memory for its work computes different bits (MKL's products), as it would without dtrrun.
  bool map(size_t nbytes) {
    size_t count = count_.load(std::memory_order_relaxed);
    if (count == segments_.size()) return false;
    size_t wanted = std::max(nbytes, std::max(mapped_, FIRST_SEGMENT));
    size_t size = (wanted + FIRST_SEGMENT - 1) & -FIRST_SEGMENT;
    if (is_limited()) {
      size_t left = mappable();
      if (reserve_ == 0) reserve_ = std::min(MOST_RESERVED, left / 4);
      left -= std::min(left, reserve_);
      wanted = std::max(nbytes, std::min(wanted, left / SHARE));
      size = std::min(size, (wanted + SMALL_SEGMENT - 1) & -SMALL_SEGMENT);
      if (size > left) return false;
    }
    void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    auto first = reinterpret_cast<uintptr_t>(found);
    segments_[count] = {first, first + size};
    count_.store(count + 1, std::memory_order_release);
    mapped_ += size;
    add(first, size, /*warm=*/false);
    return true;
  }

  static rlim_t limit_of(decltype(RLIMIT_DATA) kind) {
    rlimit found;
    return getrlimit(kind, &found) == 0 ? found.rlim_cur : RLIM_INFINITY;
  }
  // Returns how much the system will still give to this process, whose memory is limited.
  static size_t mappable() {
    unsigned long all = 0, data = 0;  // pages
    if (FILE* file = fopen("/proc/self/statm", "re")) {
      if (fscanf(file, "%lu %*u %*u %*u %*u %lu", &all, &data) != 2) all = data = 0;
      fclose(file);
    }
    rlim_t page = sysconf(_SC_PAGESIZE), left = SIZE_MAX;
    for (auto [most, pages] : {std::pair(limit_of(RLIMIT_AS), all), std::pair(limit_of(RLIMIT_DATA), data)})
      if (most != RLIM_INFINITY) left = std::min(left, most - std::min<rlim_t>(most, pages * page));
    return left;
  }

  BySize& of(bool warm) { return warm ? warm_ : cold_; }

  Ranges::iterator remove(Ranges::iterator range) {
    of(range->second.warm).erase({range->second.nbytes, range->first});
    if (range->second.warm) {
      figures_.warm -= range->second.nbytes;
      by_age_.erase({range->second.since, range->first});
    }
    return ranges_.erase(range);
  }

  void insert(uintptr_t place, size_t nbytes, bool warm, uint64_t since) {
    if (nbytes == 0) return;
    ranges_.emplace(place, Range{nbytes, warm, since});
    of(warm).emplace(nbytes, place);
    if (!warm) return;
    figures_.warm += nbytes;
    by_age_.emplace(since, place);
  }

  // Adds a free range, and merges it with adjacent ranges of the same kind.
  void add(uintptr_t place, size_t nbytes, bool warm) {
    auto next = ranges_.lower_bound(place);
    if (next != ranges_.begin()) {
      auto before = std::prev(next);
      if (before->second.warm == warm && before->first + before->second.nbytes == place) {
        place = before->first;
        nbytes += before->second.nbytes;
        next = remove(before);
      }
    }
    if (next != ranges_.end() && next->second.warm == warm && next->first == place + nbytes) {
      nbytes += next->second.nbytes;
      remove(next);
    }
    insert(place, nbytes, warm, ++clock_);
  }

  // Removes [from, to), all of which is free, from the free ranges.
  void cut(uintptr_t from, uintptr_t to) {
    auto range = std::prev(ranges_.upper_bound(from));
    while (from < to) {
      auto [place, its] = *range;
      range = remove(range);
      uintptr_t end = place + its.nbytes;
      insert(place, from - place, its.warm, its.since);
      if (end > to) insert(to, end - to, its.warm, its.since);
      uintptr_t until = std::min(end, to);
      if (!its.warm) figures_.cleared += until - from;
      from = until;
    }
  }

  // Finds a place where `nbytes` are free, many of them warm, around one of the largest warm ranges. Returns 0 if none.
  uintptr_t mostly_warm(size_t nbytes) {
    uintptr_t best = 0;
    size_t most = 0, looked_at = 0;
    for (auto one = warm_.rbegin(); one != warm_.rend() && looked_at < CANDIDATES; ++one, ++looked_at) {
      auto first = ranges_.find(one->second), last = first;
      uintptr_t begin = first->first, end = begin + first->second.nbytes;
      for (auto next = std::next(last); end - begin < nbytes && next != ranges_.end() && next->first == end; ++next)
        end += next->second.nbytes;
      while (end - begin < nbytes && first != ranges_.begin()) {
        auto before = std::prev(first);
        if (before->first + before->second.nbytes != first->first) break;
        first = before;
        begin = first->first;
      }
      if (end - begin < nbytes) continue;
      begin = std::max(begin, end - nbytes);
      begin = std::min(begin, one->second);
      size_t warm = warm_between(begin, begin + nbytes);
      if (warm > most) {
        most = warm;
        best = begin;
      }
    }
    return best;
  }

  size_t warm_between(uintptr_t from, uintptr_t to) {
    size_t warm = 0;
    for (auto range = std::prev(ranges_.upper_bound(from)); range != ranges_.end() && range->first < to; ++range)
      if (range->second.warm) warm += std::min(to, range->first + range->second.nbytes) - std::max(from, range->first);
    return warm;
  }

  void keep_to_cap() {
    static const uintptr_t page = sysconf(_SC_PAGESIZE);
    while (figures_.taken + figures_.warm > cap_ && !by_age_.empty()) {
      auto range = ranges_.find(by_age_.begin()->second);
      auto [place, its] = *range;
      size_t excess = figures_.taken + figures_.warm - cap_;
      size_t nbytes = std::min(its.nbytes, (excess + LEAST_RETURNED - 1) & -LEAST_RETURNED), kept = its.nbytes - nbytes;
      remove(range);
      insert(place, kept, /*warm=*/true, its.since);
      uintptr_t from = (place + kept + page - 1) & -page, to = (place + its.nbytes) & -page;
      if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
      figures_.returned += nbytes;
      add(place + kept, nbytes, /*warm=*/false);
    }
  }

  static constexpr size_t FIRST_SEGMENT = size_t{256} << 20, SMALL_SEGMENT = size_t{1} << 20;
  static constexpr size_t MOST_RESERVED = size_t{64} << 20, SHARE = 8;  // where memory is limited
  static constexpr size_t LEAST_RETURNED = size_t{64} << 10;
  static constexpr size_t CANDIDATES = 8;  // for a block that no warm range can hold

  std::array<std::pair<uintptr_t, uintptr_t>, 64> segments_;  // the first address, and the one past the last
  std::atomic<size_t> count_{0};                              // of segments
  size_t mapped_ = 0, cap_ = SIZE_MAX, reserve_ = 0;
  uint64_t clock_ = 0;
  Ranges ranges_;  // free ranges, by address; two of a kind never touch
  BySize warm_, cold_;
  std::set<std::pair<uint64_t, uintptr_t>> by_age_;  // warm ranges
  std::unordered_map<uintptr_t, size_t> taken_;      // blocks, and their bytes
  Figures figures_;
};

}  // namespace dtrrun
