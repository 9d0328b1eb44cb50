// Measures how long a call takes, excluding the time in which its thread was descheduled.
//
// On a busy machine, an operator may be interrupted for several times as long as it runs. Decisions based on its cost would
// then depend on chance, and in the first step, where nothing has been timed twice, be so bad that the step may not fit into
// the budget. A call that was not interrupted counts in full, with all that it has waited for, such as its own threads.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <utility>

namespace dtrrun {

struct Usage {  // of this thread
  Usage() = default;
  explicit Usage(int64_t now) : at(now), valid_until(now) {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    interruptions = usage.ru_nivcsw;
    used_ns = (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1'000'000'000ll +
              (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1'000ll;
  }
  int64_t at = 0, valid_until = 0;  // until then, no interruption can have been missed
  int64_t interruptions = 0, used_ns = 0;
};

// Asking the system takes longer than many operators. So it is not asked after a brief call, since hardly anything can have
// interrupted that, and calls that closely follow one another share the reading before them.
class OwnTime {
 public:
  // started: when the call begins.
  OwnTime(bool wanted, int64_t started) : wanted_(wanted), started_(started) {
    if (!wanted_) return;
    if (started - last_.valid_until > NOTICED_NS) last_ = Usage(started);
    before_ = last_;
  }
  // ns: the time since the call began.
  int64_t of(int64_t ns) const {
    if (!wanted_) return ns;
    int64_t ended = started_ + ns;
    if (ns <= NOTICED_NS) {
      last_.valid_until = ended;
      return ns;
    }
    last_ = Usage(ended);
    if (last_.interruptions == before_.interruptions) return ns;
    return std::clamp<int64_t>(last_.used_ns - before_.used_ns - (started_ - before_.at), 0, ns);
  }

 private:
  static constexpr int64_t NOTICED_NS = 20'000;
  static inline thread_local Usage last_;

  bool wanted_;
  int64_t started_;
  Usage before_;
};

// How long this thread has been ready to run while others had the processor, as Linux counts it.
class ProcessorWait {
 public:
  static constexpr int64_t LONG_NS = 100'000;

  // Returns the part of a time in which this thread ran. A brief time that took `LONG_NS` was interrupted: then it leaves out
  // how long the thread has waited since it last asked, which takes 1 µs.
  static int64_t without(int64_t ns) {
    if (ns < LONG_NS) return ns;
    static thread_local ProcessorWait own;
    int64_t before = std::exchange(own.known_, own.read());
    return std::max<int64_t>(ns - (own.known_ - before), 0);
  }

 private:
  ProcessorWait() : file_(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)), known_(read()) {}
  ~ProcessorWait() {
    if (file_ >= 0) close(file_);
  }
  int64_t read() const {
    char text[64];
    ssize_t length = file_ < 0 ? -1 : pread(file_, text, sizeof text - 1, 0);
    long long ran, waited = 0;
    if (length > 0) {
      text[length] = 0;
      if (sscanf(text, "%lld %lld", &ran, &waited) != 2) waited = 0;
    }
    return waited;
  }

  const int file_;
  int64_t known_;
};

}  // namespace dtrrun
