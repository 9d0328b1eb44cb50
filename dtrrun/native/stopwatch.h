// Chooses which operators are timed for the report. Reading the clock takes 25 ns, and a brief operator would need four
// readings. So only one operator in a few is timed, chosen at random since programs repeat, and counts for the others.
#pragma once

#include <atomic>

#include "python.h"

namespace dtrrun {

class Stopwatch {
 public:
  static constexpr int64_t EACH = 4;  // how many operators a timed one counts for

  // An operator has arrived.
  Stopwatch() {
    // A linear congruential generator, whose highest bits are the best. Races between threads may disturb it.
    uint32_t next = random_.load(std::memory_order_relaxed) * 1664525 + 1013904223;
    random_.store(next, std::memory_order_relaxed);
    if (next >> 30 == 0) entered_ = now_ns();
  }
  bool is_on() const { return entered_ != 0; }
  // ns: part of the time before it runs, accounted for elsewhere.
  void leave_out(int64_t ns) {
    if (is_on()) entered_ += ns;
  }
  // Returns the time before `started`, scaled to stand for other operators, too; 0 if this one is not timed.
  int64_t before(int64_t started) const { return is_on() ? EACH * (started - entered_) : 0; }

 private:
  static inline std::atomic<uint32_t> random_{1};
  int64_t entered_ = 0;
};

}  // namespace dtrrun
