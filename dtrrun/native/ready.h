// Makes a call ready to run: brings its inputs back and makes room for its outputs (`SlowPath.make_ready` in
// runtime/dispatch/slow_path.py).
#pragma once

#include "callers.h"
#include "backend.h"
#include "turns.h"

namespace dtrrun {

class Readiness {
 public:
  using Inputs = c10::SmallVector<Ref, 6>;  // versions

  Readiness(PyObject* slow_path, const Lock& lock, TensorVersions& versions)
      : slow_path_(Ref::copy(slow_path)), lock_(lock), versions_(versions), core_(versions.core), ledger_(core_.ledger) {}

  // Whether a call whose inputs are in memory can run at once.
  bool is_ready(PyObject* found) const {
    return ledger_.resident_bytes + ledger_.reserved_bytes + signature_.output_bytes.number(found) <= ledger_.limit;
  }

  // found: the call's signature. inputs_resident: whether its inputs are in memory. shared: whether other threads' operators may be
  // under way. Returns the time in ns that is accounted for elsewhere, or nothing if Python has to wait until one of them
  // ends. Raises the budget error.
  std::optional<int64_t> make_ready(const Inputs& inputs, bool inputs_resident, PyObject* found, bool shared) {
    int64_t before = accounted(), began = now_ns();
    Anchors anchors(versions_, Words::of_foreign_code());
    do {
      Ref error;
      try {
        if (natively(inputs, inputs_resident, found, shared)) return accounted() - before;
        break;
      } catch (const python_error& failure) {
        if (!core_.backend->is_budget_error()) throw;
        if (shared && ledger_.any_reserved()) return std::nullopt;
        error = as_error(std::current_exception());
      }
      if (!found_garbage(began)) refuse(std::move(error), inputs, found);
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
    ledger_.collect_dead();
    if (ledger_.any_reserved() && !shared) return false;
    Locked locked(inputs, ledger_.clock);
    if (!inputs_resident) bring_back(inputs);
    make_room(found);
    return true;
  }

  void bring_back(const Inputs& inputs) {
    // Kernels run without the GIL, and another thread's slow path must wait until the plan is carried out.
    Held held(lock_);
    std::vector<VersionRef> targets;
    for (const Ref& one : inputs) targets.emplace_back(node_of(one.get()));
    core_.rematerializer.materialize(targets, true);
  }

  int64_t accounted() const { return core_.eviction.making_room_ns + ledger_.recomputed_ns; }

  // Raises the budget error.
  void make_room(PyObject* found) {
    int64_t nbytes = signature_.output_bytes.number(found);
    if (core_.eviction.try_room(nbytes)) return;
    Ref eviction = attribute(attribute(ledger_object(), "dtr").get(), "eviction");
    Ref name = attribute(signature_.operator_.get(found), "name");
    checked(PyObject_CallMethod(eviction.get(), "no_room", "LO", static_cast<long long>(nbytes + ledger_.reserved_bytes), name.get()));
  }
  PyObject* ledger_object() const { return versions_.ledger_object(); }

  // Whether a garbage collection gives reason to try once more what the program has asked for since this time, in ns.
  bool found_garbage(int64_t since) {
    int64_t started = now_ns();
    Ref garbage = attribute(attribute(ledger_object(), "dtr").get(), "garbage");
    Ref found = checked(PyObject_CallMethod(garbage.get(), "before_refusing", "L", static_cast<long long>(since)));
    core_.eviction.making_room_ns += now_ns() - started;
    return found.get() == Py_True;
  }

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
  TensorVersions& versions_;
  Core& core_;
  Ledger& ledger_;
  VersionFields version_;
  SignatureFields signature_;
};

}  // namespace dtrrun
