// The parts that handle operators, for Python: `Operators` and `Mutation`.
#pragma once

#include "parts.h"

namespace dtrrun {

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

inline PyTypeObject* make_operators_type(const std::string& module) {
  static PyMethodDef methods[] = {
      {"adopt", with_keywords([](PyObject* self, PyObject* args, PyObject* named) -> PyObject* {
         PyObject *storage, *pin = nullptr;
         static const char* names[] = {"storage", "pin", nullptr};
         if (!PyArg_ParseTupleAndKeywords(args, named, "O|$O", const_cast<char**>(names), &storage, &pin)) return nullptr;
         return guarded([&] {
           StorageRef kept = as_storage(storage);
           Pin why = pin == nullptr ? pins::CONSTANT : as_pin(pin);
           return as_object(core_of_part(self).operators.adopt(kept.get(), why).get()).release();
         });
       }),
       METH_VARARGS | METH_KEYWORDS,
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
      {"escape_together",
       [](PyObject* self, PyObject* args) -> PyObject* {
         PyObject *versions, *why;
         if (!PyArg_ParseTuple(args, "OO", &versions, &why)) return nullptr;
         return done([&] { core_of_part(self).mutation.escape_together(versions_in(versions), as_pin(why)); });
       },
       METH_VARARGS, "escape_together(versions, why): let several resident versions escape. Raises the budget error."},
      {"written_outside", with_keywords([](PyObject* self, PyObject* args, PyObject* named) -> PyObject* {
         PyObject *version, *why;
         int escapes;
         static const char* names[] = {"version", "why", "escapes", nullptr};
         if (!PyArg_ParseTupleAndKeywords(args, named, "OO$p", const_cast<char**>(names), &version, &why, &escapes))
           return nullptr;
         return done([&] { core_of_part(self).mutation.written_outside(native_node(version), as_pin(why), escapes != 0); });
       }),
       METH_VARARGS | METH_KEYWORDS,
       "written_outside(version, why, *, escapes): code that is not an operator is about to write to the memory.\n\n"
       "escapes: it may also do so later. Raises the budget error."},
      {nullptr, nullptr, 0, nullptr},
  };
  return make_part_type(module + ".Mutation", methods, nothing_computed);
}

}  // namespace dtrrun
