// Measures dtrrun's own time for the report: from an operator's arrival until its caller goes on, without its kernel. Reading
// the clock takes 25 ns, and a brief operator needs four readings. So only one operator in a few is timed, chosen at random
// since programs repeat, and counts for the others.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>

#include "contention.h"
#include "python.h"

namespace dtrrun {

class Stopwatch {
 public:
  static constexpr int64_t LOOK_NS = 5'000'000;  // how often it is looked whether something else is due
  static constexpr int64_t EACH = 8;  // how many operators a timed one counts for

  // An operator has arrived.
  Stopwatch() {
    // A linear congruential generator, whose highest bits are the best. Races between threads may disturb it.
    uint32_t next = random_.load(std::memory_order_relaxed) * 1664525 + 1013904223;
    random_.store(next, std::memory_order_relaxed);
    if (next >> 29 == 0) entered_ = now_ns();
  }
  // Its caller goes on. Another thread may have the GIL by now.
  ~Stopwatch() {
    if (is_on()) add(std::max<int64_t>(now_ns() - entered_ - READING_NS, 0));
  }
  Stopwatch(const Stopwatch&) = delete;

  bool is_on() const { return entered_ != 0; }
  // Says which operator it is.
  void is_of(const c10::OperatorHandle& op) {
    if (is_on()) warm_ = &warm_of_[(reinterpret_cast<uintptr_t>(&op.schema()) >> 6) % warm_of_.size()];
  }
  // ns: part of the time since it arrived that is not our own, or accounted for elsewhere.
  void leave_out(int64_t ns) {
    if (is_on() && ns > 0) entered_ += ns + READING_NS;
  }
  // Leaves out the time while in scope.
  class Pause {
   public:
    explicit Pause(Stopwatch& watch) : watch_(watch), began_(watch.is_on() ? now_ns() : 0) {}
    ~Pause() {
      if (began_ != 0) watch_.leave_out(now_ns() - began_);
    }
    Pause(const Pause&) = delete;

   private:
    Stopwatch& watch_;
    const int64_t began_;
  };

  // Returns the time of all operators that a timed one stands for. What takes long in one of them, such as an import in a first
  // call, takes no time in the others.
  static int64_t for_all(int64_t ns) {
    ns = ProcessorWait::without(ns);
    return ns + (EACH - 1) * std::min(ns, ProcessorWait::LONG_NS);
  }

  // Returns the time so far of all operators of this process, estimated, in ns.
  static int64_t own_ns() { return own_.load(std::memory_order_relaxed); }
  // Returns the part of it that was spent waiting for code and data that the program had displaced from the caches: what the
  // operators took beyond the quickest ones of their kind.
  static int64_t cold_ns() { return cold_.load(std::memory_order_relaxed); }

 private:
  // How long reading the clock takes: a time between two readings includes that of one.
  static int64_t reading_ns() {
    int64_t least = INT64_MAX;
    for (int i = 0; i < 64; i++) {
      int64_t before = now_ns();
      least = std::min(least, now_ns() - before);
    }
    return least;
  }

  // How long an operator takes in the quickest cases, in 1/16 ns. Races between threads may disturb it.
  using Warm = std::atomic<int64_t>;

  void add(int64_t ns) {
    own_.fetch_add(for_all(ns), std::memory_order_relaxed);
    if (ns >= ProcessorWait::LONG_NS) return;
    int64_t warm = warm_->load(std::memory_order_relaxed), now = 16 * ns;
    if (warm == 0) warm = now;
    cold_.fetch_add(EACH * std::max<int64_t>(now - warm, 0) / 16, std::memory_order_relaxed);
    warm_->store(now < warm ? (warm + now) / 2 : warm + warm / 1024, std::memory_order_relaxed);
  }

  static inline const int64_t READING_NS = reading_ns();
  static inline std::atomic<uint32_t> random_{1};
  static inline std::atomic<int64_t> own_{0}, cold_{0};
  static inline std::array<Warm, 256> warm_of_{};  // by operator: what there is to do differs. The first for what is none
  int64_t entered_ = 0;
  Warm* warm_ = &warm_of_[0];
};

}  // namespace dtrrun
