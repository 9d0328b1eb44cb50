// Runs the kernel of a call on the fast path, beside the operators of other threads.
#pragma once

#include "contention.h"
#include "record.h"
#include "replays.h"
#include "shortage.h"

namespace dtrrun {

// A kernel whose tensors are not known here: for it, nothing is evicted.
class Unkept final : public Shortage::Kernel {
 public:
  bool keep(bool) override { return false; }
};

class KernelRun {
 public:
  // waiting: how many threads wait until an operator of another one ends.
  KernelRun(PyObject* python, PyObject* slow_path, const Device& device, TensorVersions& versions, FirstCalls& first_calls,
            const Slot& waiting)
      : python_(Ref::copy(python)), slow_path_(Ref::copy(slow_path)), device_(device), versions_(versions), core_(versions.core),
        ledger_(core_.ledger), first_calls_(first_calls), waiting_(waiting) {}

  // Runs the kernel, and makes the versions of what it has written to. Returns false if it did not begin for want of a GPU's
  // memory: then Python will run it again. started: when it begins, or 0 if nobody wants to know when it ended.
  bool run(FastCall& call, DispatchKeySet keys, const Gil& gil, int64_t started, int64_t& ended) {
    PyObject* found = call.signature.get();
    OwnTime own(signature.calls.number(found) < Signature::SETTLED, started);
    bool has_run = false;
    auto run_kernel = [&] {
      Keeping keeping(*this, call);
      call.op.redispatchBoxed(keys & way_in.below, call.stack);
      has_run = true;
      if (started != 0) ended = now_ns();
    };
    try {
      if (device_.is_cpu() && signature.calls.number(found) != 0 && signature.cost.number(found) < BRIEF_NS) {
        run_kernel();
      } else {
        Others others(*this, call);
        Gil::Released released(gil);
        run_kernel();
      }
      if (call.unpriced) first_calls_.price(found, call.info, *call.unpriced, call.op.schema(), *call.stack);
      ledger_.ran(as_signature(found)->figures, own.of(ended - started));
      ledger_.collect_dead();
      if (call.info.updates)
        for (const Ref& one : call.statistics)
          if (version.used.is_true(one.get())) versions_.supersede(one.get(), nullptr, 0);
      if (call.targets.empty()) return true;
      // Before their versions are others. `addbmm_` may resize what it writes to, and `out` may be.
      c10::SmallVector<const c10::StorageImpl*, 2> written;
      if (call.info.handler == HandlerKind::WRITES)
        for (const auto& one : call.targets) written.push_back(as_stored(one.target)->storage);
      if (call.maker && call.has_recipe()) {
        mark_used(call.maker.get());
        for (const auto& one : call.targets)
          call.made.emplace_back(~static_cast<Py_ssize_t>(one.input),
                                 versions_.supersede(one.target, call.maker.get(), signature.cost.number(found)));
        Recording::set_outputs(call.maker.get(), call.made);
      } else {
        for (const auto& one : call.targets)
          if (version.used.is_true(one.target)) versions_.supersede(one.target, nullptr, 0);
      }
      for (const c10::StorageImpl* storage : written) note_size(storage);
    } catch (...) {
      bool retried = false;
      try {
        PyObject *operator_ = call.info.operator_.get(), *rng = call.rng.get();
        retried = !device_.is_cpu() && !has_run && can_retry(python_.get(), operator_, rng);
      } catch (const python_error&) {  // an interrupt
        half_written(call);
        throw;
      }
      if (retried) return false;
      half_written(call);
      throw;
    }
    return true;
  }

 private:
  // While a kernel runs, other threads may have their turns, unless it writes to what is in the ledger, or draws from a
  // generator. Nobody evicts what it reads meanwhile, or takes the room that was made for it.
  class Others {
   public:
    Others(KernelRun& runner, FastCall& call) : runner_(runner), call_(call) {
      may_go_on_ = call.turn.shared() && call.targets.empty() && call.statistics.empty() && !call.info.random;
      if (!may_go_on_) return;
      runner.ledger_.reserve(reinterpret_cast<int64_t>(&call), PyThread_get_thread_ident(),
                             runner.signature.output_bytes.number(call.signature.get()));
      if (call.maker) mark_used(call.maker.get());
      call.each_input([&](PyObject* one) { runner_.version.locks.add(one, 1); });
      call.turn.pause();
    }
    ~Others() {
      if (!may_go_on_) return;
      call_.turn.resume();
      call_.each_input([&](PyObject* one) { runner_.version.locks.add(one, -1); });
      runner_.ledger_.give_back(reinterpret_cast<int64_t>(&call_));
      if (runner_.waiting_.number(runner_.slow_path_.get()) == 0) return;
      if (!Ref(PyObject_CallMethod(runner_.slow_path_.get(), "tell_waiting", nullptr))) PyErr_WriteUnraisable(nullptr);
    }
    Others(const Others&) = delete;

   private:
    KernelRun& runner_;
    FastCall& call_;
    bool may_go_on_;
  };

  // The bytes of what has been written to, if they are others than before.
  void note_size(const c10::StorageImpl* storage) {
    PyObject* found = versions_.at(storage);
    int64_t nbytes = versions_.rounded(static_cast<int64_t>(storage->nbytes()));
    if (found == nullptr || nbytes == version.nbytes.number(found)) return;
    checked(PyObject_CallMethod(versions_.ledger_object(), "resized", "OL", found, static_cast<long long>(nbytes)));
  }

  // For a kernel on the fast path that is refused memory, while other things are evicted for it.
  class Keeping final : public Shortage::Kernel {
   public:
    Keeping(KernelRun& runner, FastCall& call) : runner_(runner), call_(call) {}
    bool keep(bool on) override {
      if (on && call_.maker) mark_used(call_.maker.get());
      auto lock = [&](PyObject* one) { runner_.version.locks.add(one, on ? 1 : -1); };
      call_.each_input(lock);
      for (const auto& one : call_.targets) lock(one.target);
      for (const Ref& one : call_.statistics) lock(one.get());
      if (!on) {
        for (PyObject* one : changing_) runner_.version.escaped.set(one, false);
        changing_.clear();
        return true;
      }
      // Nothing may come to depend on a constant that is half written, as in `Mutation.about_to_change`.
      for (const auto& one : call_.targets)
        if (runner_.version.operation.is_none(one.target)) changes(one.target);
      for (const Ref& one : call_.statistics) changes(one.get());
      return true;
    }

   private:
    void changes(PyObject* constant) {
      if (runner_.version.escaped.is_true(constant)) return;
      runner_.version.escaped.set(constant, true);
      changing_.push_back(constant);
    }
    KernelRun& runner_;
    FastCall& call_;
    c10::SmallVector<PyObject*, 2> changing_;
  };

  void half_written(const FastCall& call) {
    auto write = [&](PyObject* target) {
      core_.recipes.half_written(node_of(target));
    };
    for (const auto& one : call.targets) write(one.target);
    if (call.info.updates)
      for (const Ref& one : call.statistics) write(one.get());
  }

  Ref python_, slow_path_;
  const Device& device_;
  TensorVersions& versions_;
  Core& core_;
  Ledger& ledger_;
  FirstCalls& first_calls_;
  const Slot& waiting_;
  VersionFields version;
  SignatureFields signature;
};

}  // namespace dtrrun
