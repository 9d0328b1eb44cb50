// What is counted in place of the ledger's versions while nothing can be evicted (`native/counting.h`).
//
// The program's threads count without any lock. `Ledger::settle` adds to the ledger what has been counted.
#pragma once

#include <atomic>
#include <cstdint>

namespace dtrrun {

struct Census {
  // Whether operators are only counted at present: what they make has no version, and nothing may be evicted.
  std::atomic<bool> counting{false};
  std::atomic<int64_t> ample{0};  // counting ends before all that is in memory takes more bytes: one in `share` of the limit
  int64_t share = 1;
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
  bool any() const { return operators.load(std::memory_order_relaxed) != 0; }
};

}  // namespace dtrrun
