// Makes a call ready to run: brings its inputs back, makes room for its outputs, and provides a workspace
// (`SlowPath.make_ready` in runtime/dispatch/slow_path.py).
#pragma once

#include "rematerialize.h"

namespace dtrrun {

class Readiness {
 public:
  using Inputs = c10::SmallVector<Ref, 6>;  // versions

  Readiness(PyObject* slow_path, Accounts& accounts, Evictions& evictions, Rematerializations& rematerializations,
            const Replays& replays, const Workspaces& workspaces)
      : slow_path_(Ref::copy(slow_path)), lock_(attribute(slow_path, "lock")), accounts_(accounts), evictions_(evictions),
        rematerializations_(rematerializations), replays_(replays), workspaces_(workspaces) {}

  // Whether a call whose inputs are in memory can run at once.
  bool is_ready(PyObject* found) const {
    int64_t needed = accounts_.number(ledger_.resident_bytes) + signature_.output_bytes.number(found);
    return needed <= accounts_.number(ledger_.limit) &&
           !(accounts_.is_true(ledger_.pressure) && signature_.workspace.number(found) != 0);
  }

  // found: the call's signature. whole: whether its inputs are in memory. Returns the time in ns that is accounted for
  // elsewhere. Raises the budget error.
  int64_t make_ready(const Inputs& inputs, bool whole, PyObject* found) {
    int64_t before = accounted();
    try {
      if (natively(inputs, whole, found)) return accounted() - before;
    } catch (const python_error& failure) {
      if (!rematerializations_.is_budget_error(failure)) throw;
      Ref error = as_error(std::current_exception());
      checked(PyObject_CallMethod(slow_path_.get(), "refuse", "OOO", error.get(), as_tuple(inputs).get(), found));
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
      raise();
    }
    return as_number(checked(PyObject_CallMethod(slow_path_.get(), "make_ready", "OO", as_tuple(inputs).get(), found)).get());
  }

 private:
  // Returns false, before anything has changed, if that is for Python.
  bool natively(const Inputs& inputs, bool whole, PyObject* found) {
    accounts_.collect_dead();
    if (!evictions_.is_alone()) return false;
    Locked locked(inputs, accounts_.number(ledger_.clock));
    if (!whole && !bring_back(inputs)) return false;
    evictions_.make_room(signature_.output_bytes.number(found), found);
    workspaces_.provide(found);
    return true;
  }

  bool bring_back(const Inputs& inputs) {
    // Kernels run without the GIL, and another thread's slow path must wait until the plan is carried out.
    Held held(lock_.get());
    return rematerializations_.bring_back(inputs);
  }

  int64_t accounted() const { return evictions_.making_room_ns() + replays_.operators_ns(); }

  // While these are locked.
  class Locked {
   public:
    Locked(const Inputs& inputs, int64_t clock) : inputs_(inputs) {
      for (const Ref& one : inputs_) {
        VersionFields().locks.add(one.get(), 1);
        VersionFields().last_access.set_number(one.get(), clock);
      }
    }
    ~Locked() {
      for (const Ref& one : inputs_) VersionFields().locks.add(one.get(), -1);
    }
    Locked(const Locked&) = delete;

   private:
    const Inputs& inputs_;
  };

  // While this thread holds a lock of Python's.
  class Held {
   public:
    explicit Held(PyObject* lock) : lock_(lock) { checked(PyObject_CallMethod(lock, "acquire", nullptr)); }
    ~Held() {
      if (!Ref(PyObject_CallMethod(lock_, "release", nullptr))) PyErr_WriteUnraisable(lock_);
    }
    Held(const Held&) = delete;

   private:
    PyObject* lock_;
  };

  Ref slow_path_, lock_;
  Accounts& accounts_;
  Evictions& evictions_;
  Rematerializations& rematerializations_;
  const Replays& replays_;
  const Workspaces& workspaces_;
  CounterFields ledger_;
  SignatureFields signature_;
};

}  // namespace dtrrun
