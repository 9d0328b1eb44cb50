// How long a call takes without the time in which others had this thread's core (`runtime.contention`).
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>

namespace dtrrun {

class OwnTime {
 public:
  explicit OwnTime(bool wanted) : wanted_(wanted) {
    if (wanted_) getrusage(RUSAGE_THREAD, &before_);
  }
  // ns: what has passed since then.
  int64_t of(int64_t ns) const {
    if (!wanted_) return ns;
    rusage now;
    getrusage(RUSAGE_THREAD, &now);
    return now.ru_nivcsw == before_.ru_nivcsw ? ns : std::min(ns, used(now) - used(before_));
  }

 private:
  static int64_t used(const rusage& usage) {
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1'000'000'000ll +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1'000ll;
  }

  bool wanted_;
  rusage before_;
};

}  // namespace dtrrun
