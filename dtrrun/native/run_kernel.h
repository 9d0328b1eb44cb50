// Runs the kernel of an admitted call, concurrently with the operators of other threads.
#pragma once

#include "bodies.h"
#include "callers.h"
#include "contention.h"
#include "measuring.h"
#include "record.h"
#include "replays.h"
#include "shortage.h"

namespace dtrrun {

class KernelRun {
 public:
  KernelRun(PyObject* python, PyObject* callbacks, const Device& device, TensorVersions& versions, FirstCalls& first_calls,
            Measuring& measuring, Turns& turns, TurnLock& lock)
      : python_(Ref::copy(python)), callbacks_(Ref::copy(callbacks)), device_(device), versions_(versions), core_(versions.core),
        first_calls_(first_calls), measuring_(measuring), turns_(turns), lock_(lock) {}

  // Runs the kernel. On a GPU that has no memory for it, evicts and runs it again, if it has not begun to write. is_captured: it becomes
  // a part of a CUDA graph. started: when it begins, or 0 if `ended` is not needed.
  void run(OperatorCall& call, const Gil& gil, bool is_captured, int64_t started, int64_t& ended) {
    Signature& figures = *call.signature;
    bool settled = figures.calls >= Signature::SETTLED, is_retried = false;
    OwnTime own(!settled, started);
    std::optional<Measuring::Call> measured;
    try {
      if (!settled && !device_.is_cpu() && !is_captured) measured.emplace(measuring_, figures, call.place);
      is_retried = !runs_at_once(call, gil, started, ended);
      if (is_retried) {
        measured.reset();
        run_again(call, measured, ended);
      }
      if (measured) measured->ended();
      if (call.unpriced) first_calls_.price(figures, call.info, *call.unpriced, call.arrival);
      if (call.info.foreign) look_back(call);
    } catch (...) {
      core_.operators.fail(call);
      throw;
    }
    if (device_.is_cpu()) {
      figures.learn_cost(own.of(ended - started));
    } else if (!settled) {
      measuring_.count(figures);
    }
    if (measured && (!settled || is_retried)) call.needed = measured->needed();
    call.cost = figures.cost;
  }

 private:
  // Lets other threads have their turns while a kernel runs, unless it writes to what is in the ledger, or draws from a
  // generator.
  class Others {
   public:
    explicit Others(const OperatorCall& call)
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

  // Brings back what a kernel that is not PyTorch's own touches besides its arguments, and keeps it until the kernel has ended.
  class Touched {
   public:
    Touched(TensorVersions& versions, TurnLock& lock) : versions_(versions), lock_(lock) {}
    ~Touched() {
      if (locked_.empty()) return;
      for (const VersionRef& one : locked_) one->locks--;
    }
    Touched(const Touched&) = delete;

    void touch(Version* version, bool writes) {
      static const Pin WRITTEN = as_pin("written by another operator");
      Held held(lock_);
      version->locks++;
      locked_.emplace_back(version);
      version->last_access = versions_.ledger.clock;
      if (!version->resident) {
        Rematerializer::Targets targets;
        targets.emplace_back(version);
        versions_.core.rematerializer.materialize(targets, true);
      }
      if (writes) versions_.core.mutation.written_outside(version, WRITTEN, false);
    }

   private:
    TensorVersions& versions_;
    TurnLock& lock_;
    std::vector<VersionRef> locked_;
  };

  // Returns false if a GPU had no memory for the kernel, which has not begun to write.
  bool runs_at_once(OperatorCall& call, const Gil& gil, int64_t started, int64_t& ended) {
    try {
      kernel(call, gil, started, ended);
      return true;
    } catch (...) {
      if (device_.is_cpu()) throw;
      core_.ledger.use(call.place);  // another thread may have had its turn
      if (!can_retry(python_.get(), call.info.operator_.get(), call.rng.get())) throw;
      return false;
    }
  }
  void kernel(OperatorCall& call, const Gil& gil, int64_t started, int64_t& ended) {
    auto run_own = [&] {
      Shortage::Kernel::run(/*locked=*/true, /*own=*/true, [&] { call.arrival.run(); });
      if (started != 0) ended = now_ns();
    };
    if (device_.is_modelled()) {
      run_on_model(call);
      ended = now_ns();
    } else if (call.info.foreign) {
      run_foreign(call, ended);
    } else if (call.info.collective) {  // it may wait for another thread
      Turns::Away away(turns_, call.turn);
      WithoutGil released;
      run_own();
    } else if (device_.is_cpu() && call.signature->calls != 0 && call.signature->cost < BRIEF_NS) {
      run_own();
    } else {
      Others others(call);
      Gil::Released released(gil);
      run_own();
    }
  }

  // Runs a kernel that is not PyTorch's own: the operators that it calls arrive.
  void run_foreign(OperatorCall& call, int64_t& ended) {
    Arrival& arrival = call.arrival;
    std::optional<KeptTensors> keeping;
    if (call.special().counts) keeping.emplace(arrival.values(), arrival.count);
    Stack stack = arrival.copied();  // only now: the kernel consumes these
    Touched touched(versions_, lock_);
    Body body([&](Version* version, bool writes) { touched.touch(version, writes); }, arrival.values(), arrival.count);
    {
      Turns::Away away(turns_, call.turn);  // it may wait for another thread
      auto seen = c10::impl::tls_local_dispatch_key_set();
      seen.excluded_ = seen.excluded_ - WayIn::OWN;
      c10::impl::ForceDispatchKeyGuard program(seen);
      WithoutGil released;
      Shortage::Kernel::run(/*locked=*/true, /*own=*/false,
                            [&] { arrival.op.redispatchBoxed(arrival.keys & WayIn::BELOW, &stack); });
      ended = now_ns();
    }
    if (keeping) call.special().kept = keeping->kept(stack);
    bool reads_unseen = body.reads_unseen(stack);
    arrival.set_results(std::move(stack));
    if (reads_unseen || !call.special().kept.empty()) not_replayable(call);
  }
  void run_on_model(OperatorCall& call) {
    auto convert = [&](size_t place) { return to_python(call.arrival.values()[place], (*call.info.enumerations)[place]); };
    auto [args, kwargs] = to_arguments(call.arrival.schema(), call.arrival.values(), PyTuple_New, convert);
    auto compute = [&] {
      call.arrival.run();
      return shown_results(call.arrival.results());
    };
    Ref function = callable(compute);
    device_.run(call.info.func.get(), args.get(), kwargs.get(), function.get(), /*again=*/false);
  }
  // A second call of the kernel might give another result.
  void not_replayable(OperatorCall& call) {
    call.recordable = false;
    for (const at::Tensor& tensor : call.special().kept) {
      const auto* storage = Body::storage_of(tensor);
      for (Version* one : call.versions)
        if (one->key == reinterpret_cast<int64_t>(storage)) call.handed_out.emplace_back(one);
    }
    for (const Call::Write& one : call.written)
      if (!one.target->used) core_.recipes.make_constant(one.target, pins::NOT_REPLAYABLE);
    if (!call.special().kept.empty())
      checked(PyObject_CallMethod(callbacks_.get(), "has_kept_tensors", "O", call.info.operator_.get()));
  }
  // Finds out whether a kernel has drawn random numbers.
  void look_back(OperatorCall& call) {
    if (!call.rng) return;
    if (checked(PyObject_CallMethod(python_.get(), "has_drawn", "(O)", call.rng.get())).get() == Py_True) {
      call.special().drawn = call.turn.shared();
      return;
    }
    call.rng = Ref();
    if (call.maker) recipe_of(enclosing(call.maker.get()))->rng = Ref();
  }

  // Runs a kernel again that a GPU had no memory for. Python evicts before each attempt, and raises the budget error in the end.
  void run_again(OperatorCall& call, std::optional<Measuring::Call>& measured, int64_t& ended) {
    auto attempt = [&] {
      call.arrival.restore();
      measured.reset();
      measured.emplace(measuring_, *call.signature, call.place, /*retried=*/true);
      if (device_.is_modelled()) return run_on_model(call);
      if (call.info.foreign) return run_foreign(call, ended);
      WithoutGil released;
      Shortage::Kernel::run(/*locked=*/true, /*own=*/true, [&] { call.arrival.run(); });
      ended = now_ns();
    };
    Ref run = callable(attempt);
    checked(PyObject_CallMethod(python_.get(), "run_again", "OOOLO", run.get(), call.info.operator_.get(),
                                call.rng ? call.rng.get() : Py_None, static_cast<long long>(call.signature->output_bytes),
                                call.signature->calls > 0 ? Py_True : Py_False));
  }

  Ref python_, callbacks_;
  const Device& device_;
  TensorVersions& versions_;
  Core& core_;
  FirstCalls& first_calls_;
  Measuring& measuring_;
  Turns& turns_;
  TurnLock& lock_;
};

}  // namespace dtrrun
