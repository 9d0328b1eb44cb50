// What the first calls of a signature take on a GPU: its time, and the most memory that its kernel has at once.
//
// The host returns from a launch long before the kernel has run, so the host's clock is of no use: events are recorded before and
// after. Nothing waits for one: until it has been read, the cost model's value is used.
//
// The time between two events is that of the kernels only if the GPU was busy with earlier work while the host launched them.
// Otherwise it includes the time of the launch: on an H200, a kernel of 5 µs seems to take 65 µs if the host needs 30 µs between the
// two records, and 180 µs if it needs 120, as it did in Python (`python -m tests.bench.gpu_short.calls`). So a pair whose
// first event had already been reached when the launch returned is only an upper bound. If a signature has no better one after its
// first call, which may load kernels, a GPU without work is given some that does nothing before the next: the pair then is exact,
// and the program loses nothing, since its GPU would wait for the host.
#pragma once

#include <c10/core/Event.h>

#include <deque>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device_allocator.h"
#include "operator_call.h"
#include "meter.h"

namespace dtrrun {

class Measuring {
 public:
  // python: Python's `Interposer`.
  Measuring(PyObject* python, const Device& device)
      : python_(Ref::copy(python)), device_(device), times_(truth(python, "times")) {}

  // One call, until it has run.
  class Call {
   public:
    // place: of the device on which it runs. retried: it may have found no memory at first, so its memory is measured even if it is none of the first calls.
    Call(Measuring& by, Signature& figures, int64_t place, bool retried = false) : by_(by), figures_(figures), place_(place) {
      by_.poll();
      bool first = figures.calls < 2;  // the very first call may initialise libraries, or try several kernels
      if ((first || retried) && by_.metering() == BLOCKS) meter_.emplace();
      if (first && by_.metering() == STATISTICS) before_ = by_.ask("statistics");
      if (!by_.may_time(place) || figures.calls >= Signature::SETTLED) return;
      start_.emplace(by_.event(place));
      if (figures.calls != 0 && !figures.timed && stream().query()) by_.ask("occupy");
      start_->record(stream());
    }
    ~Call() {
      if (start_) by_.idle(place_).push_back(std::move(*start_));
    }
    Call(const Call&) = delete;

    // Its kernel has returned.
    void ended() {
      if (meter_) needed_ = meter_->most();
      meter_.reset();
      if (before_) needed_ = as_number(checked(PyObject_CallMethod(by_.python_.get(), "taken", "(O)", before_.get())).get());
      if (!start_) return;
      bool exact = !start_->query();  // otherwise the GPU has waited for the host
      c10::Event end = by_.event(place_);
      end.record(stream());
      Ref kept = Ref::copy(reinterpret_cast<PyObject*>(enclosing(&figures_)));
      by_.pending_.push_back({std::move(kept), std::move(*start_), std::move(end), exact && !figures_.timed, place_});
      start_.reset();
      figures_.timed = figures_.timed || exact;
    }
    int64_t needed() const { return needed_; }  // bytes; -1: unknown

   private:
    const c10::Stream& stream() const { return by_.device_.main_stream(place_); }

    Measuring& by_;
    Signature& figures_;
    const int64_t place_;
    std::optional<Meter> meter_;
    Ref before_;  // the allocator's statistics
    std::optional<c10::Event> start_;
    int64_t needed_ = -1;
  };

  // Counts a call that has run; the rest is known once its event is read.
  void count(Signature& figures) const {
    if (figures.calls >= Signature::SETTLED) return;
    bool more = times_ && (figures.calls + 1 < TIMED || !figures.timed);
    figures.calls = more ? figures.calls + 1 : Signature::SETTLED;
  }
  // A call is over, and its results, of `made` bytes, are in the ledger. needed: the most bytes that it had at once; -1: unknown.
  static void finished(Signature& figures, const OperatorInfo& info, int64_t needed, int64_t made) {
    if (needed >= 0) {
      if (figures.calls == 2)
        figures.output_bytes = std::min(needed, figures.output_bytes);
      else
        figures.output_bytes = figures.calls == 1 && !info.dynamic ? needed : std::max(needed, figures.output_bytes);
    }
    if (info.convolves) {
      int64_t workspace = figures.output_bytes - made;
      figures.workspace = workspace >= LEAST_WORKSPACE ? workspace : 0;
    }
  }
  // A call is over. hash: tells signatures of the operator apart. Looks at what the driver shows if it is the first such call, and
  // may have loaded kernels, or a library.
  void loaded(const OperatorInfo& info, PyObject* signature, uint64_t hash) {
    uint64_t kernel = info.number;
    if (info.chooses_kernels && seen_.size() < MOST_SEEN) {
      if (!seen_.insert(kernel ^ hash).second) return;
      size_t count = chosen_[&info]++;
      if (count < LOOKED_AT || count % LOOKED_AT == 0) ask("loaded");  // a library has few kernels: most sizes bring none
    } else {
      std::set<PyObject*> dtypes;
      for (PyObject* one : Items(as_signature(signature)->geometries)) dtypes.insert(PyTuple_GET_ITEM(one, 3));
      for (PyObject* one : dtypes) kernel = kernel * 31 + reinterpret_cast<uint64_t>(one);
      if (seen_.insert(kernel).second) ask("loaded");
    }
  }

  // Reads events that have been reached: a signature's cost is the least measured. Others than exact ones are upper bounds, which
  // only lower the cost model's value.
  void poll() {
    for (int i = 0; i < READ_AT_ONCE && !pending_.empty() && pending_.front().end.query(); i++) {
      Pair one = std::move(pending_.front());
      pending_.pop_front();
      int64_t cost = std::max<int64_t>(std::llround(one.start.elapsedTime(one.end) * 1e6), 1);
      Signature& figures = as_signature(one.signature.get())->figures;
      if (cost < figures.cost || one.replaces) figures.cost = cost;
      idle(one.place).push_back(std::move(one.start));
      idle(one.place).push_back(std::move(one.end));
    }
  }

 private:
  static constexpr size_t MOST_PENDING = 512;
  static constexpr int READ_AT_ONCE = 8;
  // Calls of a signature that are timed, which took the host some 70 µs each in Python (an H100's). If none of them was
  // exact, since the allocator has waited for the GPU, more are, up to `Signature::SETTLED`.
  static constexpr int64_t TIMED = 3;
  static constexpr int64_t LEAST_WORKSPACE = int64_t{1} << 20;  // less fits into the slack
  static constexpr size_t MOST_SEEN = 10'000, LOOKED_AT = 32;

  struct Pair {
    Ref signature;
    c10::Event start, end;
    bool replaces;  // the first exact one
    int64_t place;  // of its device
  };

  // What a side stream runs is not timed.
  bool may_time(int64_t place) const {
    return times_ && !device_.is_cpu() && !device_.is_modelled() && device_.on_main_stream(place) &&
           pending_.size() < MOST_PENDING;
  }
  // An event belongs to the device on which it is recorded first.
  std::vector<c10::Event>& idle(int64_t place) {
    if (idle_.size() <= static_cast<size_t>(place)) idle_.resize(static_cast<size_t>(place) + 1);
    return idle_[static_cast<size_t>(place)];
  }
  c10::Event event(int64_t place) {
    std::vector<c10::Event>& all = idle(place);
    if (all.empty()) return c10::Event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    c10::Event one = std::move(all.back());
    all.pop_back();
    return one;
  }

  // How the memory that a kernel needs is measured.
  enum Metering : int64_t { UNKNOWN = -1, NOT, BLOCKS, STATISTICS };
  int64_t metering() {
    if (metering_ == UNKNOWN) metering_ = as_number(ask("metering").get());
    return metering_;
  }
  Ref ask(const char* method) const { return checked(PyObject_CallMethod(python_.get(), method, nullptr)); }

  Ref python_;
  const Device& device_;
  const bool times_;
  int64_t metering_ = UNKNOWN;
  std::deque<Pair> pending_;
  std::vector<std::vector<c10::Event>> idle_;  // by place
  std::unordered_set<uint64_t> seen_;  // kernels
  std::unordered_map<const OperatorInfo*, size_t> chosen_;  // signatures of operators that choose kernels
};

}  // namespace dtrrun
