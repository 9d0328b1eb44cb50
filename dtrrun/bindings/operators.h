// Operator calls made in Python (`core.operator.Call`), for the core, and the parts that handle them: `Operators` and `Mutation`.
#pragma once

#include "parts.h"

namespace dtrrun {

// A `core.operator.Call`. Its attributes are read once for each step (such as `admit` or `finish`).
class PythonCall final : public Call {
 public:
  // outputs: those given to `Operators.finish`, or null.
  PythonCall(PyObject* ledger, PyObject* call, PyObject* outputs = nullptr)
      : PythonCall(core_of(ledger).taken[reinterpret_cast<int64_t>(call)], ledger, call, outputs) {
    id = reinterpret_cast<int64_t>(call);
    signature_ = attribute(call, "signature");
    if (!PyObject_TypeCheck(signature_.get(), signature_type)) {
      PyErr_SetString(PyExc_TypeError, "a call has a Signature of its extension");
      raise();
    }
    signature = &as_signature(signature_.get())->figures;
    versions_ = checked(PySequence_Fast(attribute(call, "versions").get(), "versions must be a sequence"));
    Items all(versions_.get());
    versions.reserve(static_cast<size_t>(all.size()));
    for (PyObject* one : all) versions.push_back(native_node(one));
    read_written();
    for (int64_t hole : numbers("statistics")) statistics.push_back(static_cast<size_t>(hole));
    handed_out = versions_in(attribute(call, "handed_out").get());
    cost = attribute_number(call, "cost");
    replayable = truth(call, "replayable");
    recordable = truth(call, "recordable");
    view = truth(call, "view");
    untouching = truth(call, "untouching");
    reshapes = truth(call, "reshapes");
    opaque = truth(call, "opaque");
    uninitialised = truth(call, "uninitialised");
    shrinks = truth(call, "shrinks");
    updates_statistics = truth(call, "updates_statistics");
  }
  ~PythonCall() {
    if (!locked && changing.empty()) core_of(ledger_).taken.erase(id);
  }

  std::vector<Version*> versions;
  std::vector<Write> written;
  std::vector<size_t> statistics;
  std::vector<VersionRef> handed_out;
  bool& locked;
  std::vector<VersionRef>& changing;

  // Tells Python whether the call gets a recipe.
  void tell_recordable() const {
    if (PyObject_SetAttrString(call_, "recordable", recordable ? Py_True : Py_False) < 0) raise();
  }

  bool is_leaf(size_t place) { return ask("is_leaf", place).get() == Py_True; }
  bool overwrites(size_t place) { return ask("overwrites", place).get() == Py_True; }
  std::optional<int64_t> resized(size_t hole, Version* version) {
    Ref found = checked(PyObject_CallMethod(call_, "resized", "nO", static_cast<Py_ssize_t>(hole), as_object(version).get()));
    if (found.get() == Py_None) return std::nullopt;
    return as_number(found.get());
  }
  void made(int64_t nbytes) { checked(PyObject_CallMethod(call_, "made", "L", static_cast<long long>(nbytes))); }
  template <class Entries>
  OperationRef record(const Entries& entries) {
    Ref tensors = checked(PyList_New(0));
    std::unordered_set<Version*> seen;
    std::vector<Version*> reads;
    std::unordered_map<size_t, Ref> blank;  // the stand-in for each overwritten version
    auto add = [&](PyObject* one) {
      if (PyList_Append(tensors.get(), one) < 0) raise();
    };
    auto read = [&](Version* version) {
      add(as_object(version).get());
      if (seen.insert(version).second) reads.push_back(version);
    };
    auto overwritten = [&](size_t place) {
      Ref& stand_in = blank[place];
      if (!stand_in) stand_in = ask("overwritten", place);
      add(stand_in.get());
    };
    entries(read, overwritten);
    OperationRef made = blank_operation();
    OperationObject* operation = enclosing(made.get());
    shown_of(operation).recorded = checked(PyObject_CallMethod(call_, "recorded", nullptr)).release();
    set_signature(operation, checked(PyObject_CallMethod(call_, "replay_signature", nullptr)).get());
    if (static_cast<Py_ssize_t>(reads.size()) != PyList_GET_SIZE(tensors.get())) take_tensors(operation, std::move(tensors));
    set_reads(made.get(), reads);
    return made;
  }

  void admitted() { tell("admitted"); }
  void abandoned() { tell("abandoned"); }
  void failed() { tell("failed"); }
  void finished() {
    each_observer([&](PyObject* one) { return PyObject_CallMethod(one, "finished", "OO", call_, outputs_); });
  }
  std::nullptr_t about_to_shrink() { return nullptr; }

 private:
  // taken: what the call has taken so far. It outlives this object.
  PythonCall(Core::Taken& taken, PyObject* ledger, PyObject* call, PyObject* outputs)
      : locked(taken.locked), changing(taken.changing), ledger_(ledger), call_(call), outputs_(outputs) {}
  void tell(const char* what) {
    each_observer([&](PyObject* one) { return PyObject_CallMethod(one, what, "O", call_); });
  }
  template <class Function>
  void each_observer(const Function& function) {
    each_in(as_ledger(ledger_)->observers, function);
  }
  Ref ask(const char* method, size_t place) const {
    return checked(PyObject_CallMethod(call_, method, "n", static_cast<Py_ssize_t>(place)));
  }
  std::vector<int64_t> numbers(const char* name) const { return numbers_in(attribute(call_, name).get()); }
  static std::vector<int64_t> numbers_in(PyObject* sequence) {
    std::vector<int64_t> found;
    Ref items = checked(PySequence_Fast(sequence, "numbers must be a sequence"));
    for (PyObject* one : Items(items.get())) found.push_back(as_number(one));
    return found;
  }
  // Reads a dict of holes, by the id of each version that the call writes to.
  void read_written() {
    Ref all = attribute(call_, "written");
    PyObject *key, *holes;
    for (Py_ssize_t place = 0; PyDict_Next(all.get(), &place, &key, &holes);) {
      auto first = static_cast<size_t>(numbers_in(holes).at(0));
      written.push_back({versions.at(first), first});
    }
  }

  PyObject *const ledger_, *const call_, *const outputs_;
  Ref signature_, versions_;
};

// Converts the name of a kind of output (`core.operator`).
inline NewStorage::Kind as_kind(std::string_view name) {
  if (name.empty()) return NewStorage::NEW;
  if (name == "untracked") return NewStorage::UNTRACKED;
  if (name == "read natively") return NewStorage::READ_NATIVELY;
  return name == "foreign" ? NewStorage::FOREIGN : NewStorage::ELSEWHERE;
}

// Converts a sequence of `core.operator.Output`s, which must keep their storages alive.
inline std::vector<NewStorage> new_storages_in(PyObject* sequence) {
  std::vector<NewStorage> found;
  Ref items = checked(PySequence_Fast(sequence, "outputs must be a sequence"));
  for (PyObject* output : Items(items.get())) {
    long long where;
    PyObject* storage;
    const char* kind;
    if (!PyArg_ParseTuple(output, "LOs", &where, &storage, &kind)) raise();
    found.push_back({where, storage_in(storage), as_kind(kind)});
  }
  return found;
}

// Passes a call to a method of `Operators`.
template <void (Operators::*function)(PythonCall&)>
PyObject* with_call(PyObject* self, PyObject* object) {
  return done([&] {
    PythonCall call(ledger_of(self), object);
    (core_of_part(self).operators.*function)(call);
  });
}

inline PyTypeObject* make_operators_type(const std::string& module) {
  static PyMethodDef methods[] = {
      {"admit", [](PyObject* self, PyObject* object) -> PyObject* {
         return done([&] {
           core_of_part(self).taken.erase(reinterpret_cast<int64_t>(object));  // an interrupt may have left that of another call
           PythonCall call(ledger_of(self), object);
           core_of_part(self).operators.admit(call);
           call.tell_recordable();
         });
       }, METH_O,
       "admit(call): bring the inputs back, rescue what a mutation would lose, make room and reserve it.\n\n"
       "If this raises, for instance the budget error, `abandon` releases what the call has taken."},
      {"abandon", with_call<&Operators::abandon>, METH_O, "abandon(call): release what a call has taken, when it does not run."},
      {"fail", with_call<&Operators::fail>, METH_O,
       "fail(call): a call has raised: the program gets its error, and nothing stays locked."},
      {"finish", with_keywords([](PyObject* self, PyObject* args, PyObject* named) -> PyObject* {
         PyObject *object, *outputs;
         int plain = 1;
         static const char* names[] = {"call", "outputs", "plain", nullptr};
         if (!PyArg_ParseTupleAndKeywords(args, named, "OO|$p", const_cast<char**>(names), &object, &outputs, &plain)) return nullptr;
         return done([&] {
           PythonCall call(ledger_of(self), object, outputs);
           core_of_part(self).operators.finish(call, new_storages_in(outputs), plain != 0);
         });
       }), METH_VARARGS | METH_KEYWORDS,
       "finish(call, outputs, *, plain=True): enter what a call has made; its cost is known. plain: all results have a plain storage.\n\n"
       "Raises the budget error if its outputs exceed the budget."},
      {"adopt", with_keywords([](PyObject* self, PyObject* args, PyObject* named) -> PyObject* {
         PyObject *storage, *pin = nullptr;
         static const char* names[] = {"storage", "pin", nullptr};
         if (!PyArg_ParseTupleAndKeywords(args, named, "O|$O", const_cast<char**>(names), &storage, &pin)) return nullptr;
         return guarded([&] {
           StorageRef kept = as_storage(storage);
           Pin why = pin == nullptr ? pins::CONSTANT : as_pin(pin);
           return as_object(core_of_part(self).operators.adopt(kept.get(), why).get()).release();
         });
       }), METH_VARARGS | METH_KEYWORDS,
       "adopt(storage, *, pin=\"constant\"): enter a storage that no recorded operator made, as a constant, and return its version.\n\n"
       "pin: why it can't be evicted."},
      {nullptr, nullptr, 0, nullptr},
  };
  return make_part_type(module + ".Operators", methods, nothing_computed);
}

inline PyTypeObject* make_mutation_type(const std::string& module) {
  static PyMethodDef methods[] = {
      {"rescue_dependents", with_version<&Core::rescue, &Rescue::dependents_of>, METH_O,
       "Rescue what was computed from the present content of a constant that is about to change. Raises the budget error."},
      {"escape", with_pin<&Core::mutation, &Mutation::escape>, METH_VARARGS,
       "escape(version, why): other code can reach the memory from now on: it stays, and nothing is recomputed from it.\n\n"
       "Raises the budget error."},
      {"escape_together", [](PyObject* self, PyObject* args) -> PyObject* {
         PyObject *versions, *why;
         if (!PyArg_ParseTuple(args, "OO", &versions, &why)) return nullptr;
         return done([&] { core_of_part(self).mutation.escape_together(versions_in(versions), as_pin(why)); });
       }, METH_VARARGS, "escape_together(versions, why): let several resident versions escape. Raises the budget error."},
      {"written_outside", with_keywords([](PyObject* self, PyObject* args, PyObject* named) -> PyObject* {
         PyObject *version, *why;
         int escapes;
         static const char* names[] = {"version", "why", "escapes", nullptr};
         if (!PyArg_ParseTupleAndKeywords(args, named, "OO$p", const_cast<char**>(names), &version, &why, &escapes)) return nullptr;
         return done([&] { core_of_part(self).mutation.written_outside(native_node(version), as_pin(why), escapes != 0); });
       }), METH_VARARGS | METH_KEYWORDS,
       "written_outside(version, why, *, escapes): code that is not an operator is about to write to the memory.\n\n"
       "escapes: it may also do so later. Raises the budget error."},
      {nullptr, nullptr, 0, nullptr},
  };
  return make_part_type(module + ".Mutation", methods, nothing_computed);
}

}  // namespace dtrrun
