// Which operators are timed for the report. To read the clock takes 25 ns, and for a brief operator it would be read four
// times. So one in a few of them is timed, chosen at random since programs repeat, and counts for the others.
#pragma once

#include <atomic>

#include "python.h"

namespace dtrrun {

class Stopwatch {
 public:
  static constexpr int64_t EACH = 4;  // what a timed one counts for

  // An operator has come.
  Stopwatch() {
    // A linear congruential generator, of which the highest bits are the best. Threads may disturb it.
    uint32_t next = random_.load(std::memory_order_relaxed) * 1664525 + 1013904223;
    random_.store(next, std::memory_order_relaxed);
    if (next >> 30 == 0) entered_ = now_ns();
  }
  bool is_on() const { return entered_ != 0; }
  // ns: accounted for elsewhere, of the time before it runs.
  void leave_out(int64_t ns) {
    if (is_on()) entered_ += ns;
  }
  // The time before `started`, which stands for that of other operators, too; 0 if this one is not timed.
  int64_t before(int64_t started) const { return is_on() ? EACH * (started - entered_) : 0; }

 private:
  static inline std::atomic<uint32_t> random_{1};
  int64_t entered_ = 0;
};

}  // namespace dtrrun
