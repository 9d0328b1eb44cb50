// Admits a call (`Operators::admit`).
#pragma once

#include "backend.h"
#include "callers.h"
#include "operator_call.h"

namespace dtrrun {

class Admission {
 public:
  Admission(PyObject* callbacks, TurnLock& lock, TensorVersions& versions)
      : callbacks_(Ref::copy(callbacks)), lock_(lock), versions_(versions), core_(versions.core), ledger_(core_.ledger) {}

  // The time that admitting a call has taken, in ns. elsewhere: the part that is accounted for elsewhere.
  struct Times {
    int64_t all = 0, elsewhere = 0;
  };

  // Returns nullopt, with everything released, if it has waited for another thread's operator to end: the call has to be described
  // again. Raises the budget error.
  std::optional<Times> admit(OperatorCall& call) {
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    if (core_.operators.is_ready(call)) {
      attempt(call);
      return Times{};
    }
    int64_t before = accounted(), began = now_ns();
    // Kernels run without the GIL, and another thread must wait until everything is carried out.
    Held held(lock_);
    Anchors anchors(versions_, Words::of_foreign_code());
    while (true) {
      Ref error;
      int64_t unlocks = ledger_.unlocks;
      try {
        attempt(call);
        return Times{now_ns() - began, accounted() - before};
      } catch (...) {
        if (!core_.backend->is_budget_error()) throw;
        error = as_error(std::current_exception());
      }
      if (call.reserves && others_end()) return std::nullopt;
      if (found_garbage(began)) continue;
      // During the collection, others have had their turns, and may have let go of what was missing. One release is the call's own.
      if (call.reserves && ledger_.unlocks > unlocks + 1) return std::nullopt;
      refuse(std::move(error), call);
    }
  }

  // Passes the budget error that is being handled on to the program.
  [[noreturn]] void refuse(OperatorCall& call) {
    if (!core_.backend->is_budget_error()) throw;
    refuse(as_error(std::current_exception()), call);
  }

 private:
  void attempt(OperatorCall& call) {
    try {
      core_.operators.admit(call);
    } catch (...) {
      core_.operators.abandon(call);
      throw;
    }
  }
  [[noreturn]] void refuse(Ref error, const OperatorCall& call) {
    if (!truth(error.get(), "explained")) {
      Ref versions = checked(PyList_New(0));
      for (Version* one : call.versions)
        if (PyList_Append(versions.get(), as_object(one).get()) < 0) raise();
      checked(PyObject_CallMethod(callbacks_.get(), "refuse", "OOO", error.get(), versions.get(), call.its_signature.get()));
    }
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
    raise();
  }

  int64_t accounted() const { return core_.eviction.making_room_ns + ledger_.recomputed_ns; }

  // Waits until an operator of another thread ends. Returns false if there is none, or it takes too long.
  bool others_end() const { return checked(PyObject_CallMethod(callbacks_.get(), "others_end", nullptr)).get() == Py_True; }
  // Returns true if a garbage collection justifies another attempt at what the program asked for at `since`, in ns.
  bool found_garbage(int64_t since) {
    int64_t started = now_ns();
    Ref garbage = attribute(attribute(versions_.ledger_object(), "dtr").get(), "garbage");
    Ref found = checked(PyObject_CallMethod(garbage.get(), "before_refusing", "L", static_cast<long long>(since)));
    core_.eviction.making_room_ns += now_ns() - started;
    return found.get() == Py_True;
  }

  Ref callbacks_;
  TurnLock& lock_;
  TensorVersions& versions_;
  Core& core_;
  Ledger& ledger_;
};

inline std::unique_ptr<Anchors> OperatorCall::about_to_shrink() {
  return std::make_unique<Anchors>(tensor_versions, Words::of_foreign_code());
}

}  // namespace dtrrun
