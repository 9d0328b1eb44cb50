#pragma once

#include <time.h>

#include <cstdint>

namespace dtrrun {

// The same clock as Python's `perf_counter_ns`.
inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

}  // namespace dtrrun
