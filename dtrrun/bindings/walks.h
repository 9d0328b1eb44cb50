// What is looked for among all versions, for Python (`core.graph.Walks`). No code of Python's runs meanwhile, so the versions,
// and what they were computed from, stay as they are.
#pragma once

#include "../core/copies.h"
#include "../core/history.h"
#include "nodes.h"

namespace dtrrun {

// The versions in a `Ledger.versions`. Defined by each extension.
VersionList versions_of_table(PyObject* table);

class HeldProgram final : public Program {
 public:
  bool has_storage(const Version* version) const override { return program_has(as_version(as_object(version))); }
  bool is_weight(const Version* version) const override {
    PyObject* pin = as_version(as_object(version))->pin;
    if (pin == nullptr || pin == Py_None) return false;
    for (const char* one : {"parameter", "running statistics", "updated in place", "mutated"})
      if (PyUnicode_CompareWithASCIIString(pin, one) == 0) return true;
    return false;
  }
};

inline Ref as_list(const VersionList& versions) {
  Ref list = checked(PyList_New(static_cast<Py_ssize_t>(versions.size())));
  for (size_t i = 0; i < versions.size(); i++) PyList_SET_ITEM(list.get(), i, Ref::copy(as_object(versions[i])).release());
  return list;
}

inline PyObject* walk_held_bytes(PyObject*, PyObject* table) {
  return guarded([&] { return PyLong_FromLongLong(held_bytes(versions_of_table(table), HeldProgram())); });
}

inline PyObject* walk_weigh(PyObject*, PyObject* table) {
  return guarded([&] {
    Weighed found = weigh(versions_of_table(table), HeldProgram());
    Ref keys = checked(PySet_New(nullptr));
    for (int64_t one : found.keys)
      if (PySet_Add(keys.get(), checked(PyLong_FromLongLong(one)).get()) < 0) raise();
    return Py_BuildValue("(On)", keys.get(), static_cast<Py_ssize_t>(found.looked_at));
  });
}

inline PyObject* walk_carried(PyObject*, PyObject* args) {
  PyObject* table;
  long long cut_age;
  if (!PyArg_ParseTuple(args, "OL", &table, &cut_age)) return nullptr;
  return guarded([&] { return as_list(carried(versions_of_table(table), HeldProgram(), cut_age)).release(); });
}

inline PyObject* walk_mutated(PyObject*, PyObject* args) {
  PyObject *table, *trusted;
  long long age;
  if (!PyArg_ParseTuple(args, "OLO!", &table, &age, &PyList_Type, &trusted)) return nullptr;
  return guarded([&] {
    std::unordered_set<const Version*> constants;
    for (PyObject* one : Items(trusted)) constants.insert(as_version(native_node(one)));
    return as_list(mutated(versions_of_table(table), HeldProgram(), age, constants)).release();
  });
}

#define DTRRUN_WALKS                                                                                          \
  {"held_bytes", walk_held_bytes, METH_O, "See `core.graph.Walks`."},                                       \
      {"weigh", walk_weigh, METH_O, "See `core.graph.Walks`."},                                             \
      {"carried", walk_carried, METH_VARARGS, "See `core.graph.Walks`."},                                   \
      {"mutated", walk_mutated, METH_VARARGS, "See `core.graph.Walks`."}

}  // namespace dtrrun
