// What operators have made, as Python tells it.
#pragma once

#include "../core/operator.h"
#include "nodes.h"

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

}  // namespace dtrrun
