// Makes a call ready to run: brings its inputs back, makes room for its outputs, and provides a workspace
// (`SlowPath.make_ready` in runtime/dispatch/slow_path.py).
#pragma once

#include "callers.h"
#include "rematerialize.h"
#include "turns.h"

namespace dtrrun {

class Readiness {
 public:
  using Inputs = c10::SmallVector<Ref, 6>;  // versions

  Readiness(PyObject* slow_path, const Lock& lock, Accounts& accounts, Evictions& evictions,
            Rematerializations& rematerializations, const Replays& replays, const Workspaces& workspaces)
      : slow_path_(Ref::copy(slow_path)), lock_(lock), accounts_(accounts), evictions_(evictions),
        rematerializations_(rematerializations), replays_(replays), workspaces_(workspaces) {}

  // Whether a call whose inputs are in memory can run at once.
  bool is_ready(PyObject* found) const {
    int64_t needed = accounts_.number(ledger_.resident_bytes) + signature_.output_bytes.number(found);
    if (evictions_.any_reserved()) needed += evictions_.reserved_bytes();
    return needed <= accounts_.number(ledger_.limit) &&
           !(accounts_.is_true(ledger_.pressure) && signature_.workspace.number(found) != 0);
  }

  // found: the call's signature. inputs_resident: whether its inputs are in memory. shared: whether other threads' operators may be
  // under way. Returns the time in ns that is accounted for elsewhere, or nothing if Python has to wait until one of them
  // ends. Raises the budget error.
  std::optional<int64_t> make_ready(const Inputs& inputs, bool inputs_resident, PyObject* found, bool shared) {
    int64_t before = accounted(), began = now_ns();
    Anchors anchors(accounts_, Words::of_foreign_code());
    do {
      Ref error;
      try {
        if (natively(inputs, inputs_resident, found, shared)) return accounted() - before;
        break;
      } catch (const python_error& failure) {
        if (!rematerializations_.is_budget_error(failure)) throw;
        if (shared && evictions_.any_reserved()) return std::nullopt;
        error = as_error(std::current_exception());
      }
      if (!evictions_.found_garbage(began)) refuse(std::move(error), inputs, found);
      inputs_resident = std::all_of(inputs.begin(), inputs.end(),
                          [&](const Ref& one) { return version_.resident.is_true(one.get()); });
    } while (true);
    return as_number(checked(PyObject_CallMethod(slow_path_.get(), "make_ready", "OO", as_tuple(inputs).get(), found)).get());
  }

 private:
  [[noreturn]] void refuse(Ref error, const Inputs& inputs, PyObject* found) {
    checked(PyObject_CallMethod(slow_path_.get(), "refuse", "OOO", error.get(), as_tuple(inputs).get(), found));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
    raise();
  }

  // Returns false, before anything has changed, if that is for Python.
  bool natively(const Inputs& inputs, bool inputs_resident, PyObject* found, bool shared) {
    accounts_.collect_dead();
    if (evictions_.in_python() || (evictions_.any_reserved() && !shared)) return false;
    Locked locked(inputs, accounts_.number(ledger_.clock));
    if (!inputs_resident && !bring_back(inputs)) return false;
    evictions_.make_room(signature_.output_bytes.number(found), found);
    workspaces_.provide(found);
    return true;
  }

  bool bring_back(const Inputs& inputs) {
    // Kernels run without the GIL, and another thread's slow path must wait until the plan is carried out.
    Held held(lock_);
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

  Ref slow_path_;
  const Lock& lock_;
  Accounts& accounts_;
  Evictions& evictions_;
  Rematerializations& rematerializations_;
  const Replays& replays_;
  const Workspaces& workspaces_;
  CounterFields ledger_;
  VersionFields version_;
  SignatureFields signature_;
};

}  // namespace dtrrun
