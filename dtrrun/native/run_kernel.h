// Runs the kernel of a call on the fast path, concurrently with the operators of other threads.
#pragma once

#include "contention.h"
#include "measuring.h"
#include "record.h"
#include "replays.h"
#include "shortage.h"

namespace dtrrun {

class KernelRun {
 public:
  KernelRun(PyObject* python, const Device& device, TensorVersions& versions, FirstCalls& first_calls, Measuring& measuring)
      : python_(Ref::copy(python)), device_(device), core_(versions.core), first_calls_(first_calls), measuring_(measuring) {}

  // Runs the kernel of an admitted call. Returns false if it did not begin because a GPU ran out of memory: then Python will
  // run it again. started: when it begins, or 0 if `ended` is not needed.
  bool run(FastCall& call, const Gil& gil, int64_t started, int64_t& ended) {
    Signature& figures = *call.signature;
    bool settled = figures.calls >= Signature::SETTLED;
    OwnTime own(!settled, started);
    std::optional<Measuring::Call> measured;
    if (!settled && !device_.is_cpu()) measured.emplace(measuring_, figures);
    bool has_run = false;
    auto run_kernel = [&] {
      Shortage::Kernel::run(/*locked=*/true, /*own=*/!call.info.foreign, [&] { call.arrival.run(); });
      has_run = true;
      if (started != 0) ended = now_ns();
    };
    try {
      if (device_.is_cpu() && figures.calls != 0 && figures.cost < BRIEF_NS) {
        run_kernel();
      } else {
        Others others(call);
        Gil::Released released(gil);
        run_kernel();
      }
      if (measured) measured->ended();
      if (call.unpriced) first_calls_.price(figures, call.info, *call.unpriced, call.arrival);
    } catch (...) {
      bool retried = false;
      try {
        PyObject *operator_ = call.info.operator_.get(), *rng = call.rng.get();
        retried = !device_.is_cpu() && !has_run && can_retry(python_.get(), operator_, rng);
      } catch (...) {  // an interrupt
        core_.operators.fail(call);
        throw;
      }
      if (!retried) {
        core_.operators.fail(call);
        throw;
      }
      core_.operators.abandon(call);
      return false;
    }
    if (device_.is_cpu()) {
      figures.learn_cost(own.of(ended - started));
    } else if (!settled) {
      measuring_.count(figures);
      call.needed = measured->needed();
    }
    call.cost = figures.cost;
    return true;
  }

 private:
  // Lets other threads have their turns while a kernel runs, unless it writes to what is in the ledger, or draws from a
  // generator.
  class Others {
   public:
    explicit Others(const FastCall& call)
        : turn_(call.turn),
          may_go_on_(call.turn.shared() && call.written.empty() && !call.updates_statistics && !call.info.random) {
      if (may_go_on_) turn_.pause();
    }
    ~Others() {
      if (may_go_on_) turn_.resume();
    }
    Others(const Others&) = delete;

   private:
    Turn& turn_;
    const bool may_go_on_;
  };

  Ref python_;
  const Device& device_;
  Core& core_;
  FirstCalls& first_calls_;
  Measuring& measuring_;
};

}  // namespace dtrrun
