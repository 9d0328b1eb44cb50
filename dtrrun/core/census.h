// What is counted in place of the ledger's versions (`native/counting.h`): all operators while nothing can be evicted, or those
// of backward passes inside a budget.
//
// The program's threads count without any lock. `Ledger::settle` adds to the ledger what has been counted.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace dtrrun {

struct Census {
  // Whether operators are only counted at present: what they make has no version, and nothing may be evicted.
  std::atomic<bool> counting{false};
  std::atomic<int64_t> ample{0};  // counting ends before all that is in memory takes more bytes: one in `share` of the limit
  int64_t share = 1;
  // Inside a budget: whether operators of backward passes are only counted, if what they make is little. Then `ample` is the limit.
  std::atomic<bool> backward{false};
  std::atomic<int64_t> little{0};  // the bytes that what they have made may take together while it has no recipe
  std::atomic<int64_t> entered{0};  // of what they have made, and what has got a version since then, without a recipe
  std::atomic<int64_t> alive{0};  // storages of the session, with and without versions
  std::atomic<int64_t> bytes{0};  // of storages without versions that are alive
  std::atomic<int64_t> operators{0};  // that have run since the ledger was settled
  std::atomic<int64_t> most{0};  // the most bytes in memory since then, with those of versions
  std::atomic<int64_t> others{0};  // the bytes in memory of all that has a version, or is counted in Python

  int64_t resident() const {
    // In this order: what becomes a version meanwhile may be missing, but does not count twice.
    int64_t versions = others.load(std::memory_order_acquire);
    return versions + bytes.load(std::memory_order_acquire);
  }
  // Updates the peak. Returns the bytes in memory.
  int64_t note() {
    int64_t now = resident(), before = most.load(std::memory_order_relaxed);
    while (before < now && !most.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
    }
    return now;
  }
  // Returns the bytes that an operator of a backward pass may make now.
  int64_t room_for_little() const {
    int64_t room = ample.load(std::memory_order_relaxed) - resident();
    int64_t unknown = bytes.load(std::memory_order_relaxed) + entered.load(std::memory_order_relaxed);
    return std::min(room, little.load(std::memory_order_relaxed) - unknown);
  }
  bool any() const { return operators.load(std::memory_order_relaxed) != 0; }
};

}  // namespace dtrrun
