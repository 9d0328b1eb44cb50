// Which constants are worth a copy before they change: `weigh` in core/copies.py, which says why.
//
// No code of Python's runs meanwhile, so the versions, and what they were computed from, stay as they are.
#pragma once

#include <map>
#include <unordered_map>
#include <unordered_set>

#include "ledger.h"

namespace dtrrun {

constexpr int SHARE_SHIFT = 2;  // as in core/copies.py, like the next
constexpr int64_t SMALL = 16 << 10;

// `held_bytes`.
inline int64_t held_bytes(const Versions& versions) {
  int64_t total = 0;
  for (StoredVersion* one = versions.first(); one != nullptr; one = one->after)
    if (one->node.operation != nullptr && has_storage(one)) total += one->node.nbytes;
  return total;
}

// `_Groups`.
class Groups {
 public:
  PyObject* of(PyObject* one) {
    PyObject* top = one;
    while (PyObject* upper = above(top)) top = upper;
    while (one != top) {
      PyObject*& next = above_[one];
      one = std::exchange(next, top);
    }
    return top;
  }
  void join(PyObject* one, PyObject* other) {
    PyObject *own = of(one), *others = of(other);
    if (own != others) above_[own] = others;
  }

 private:
  PyObject* above(PyObject* one) const {
    auto found = above_.find(one);
    return found == above_.end() ? nullptr : found->second;
  }
  std::unordered_map<PyObject*, PyObject*> above_;
};

inline bool is_weight(PyObject* pin) {
  if (pin == Py_None) return false;
  for (const char* one : {"parameter", "running statistics", "updated in place", "mutated"})
    if (PyUnicode_CompareWithASCIIString(pin, one) == 0) return true;
  return false;
}

inline Ref weigh(const Accounts& accounts) {
  VersionFields version;
  OperationFields operation;
  Groups groups;
  std::vector<std::pair<PyObject*, PyObject*>> others;  // small constants, and what reads them
  std::unordered_set<PyObject*> weights, seen;
  std::vector<PyObject*> held, stack;
  for (StoredVersion* one = accounts.versions().first(); one != nullptr; one = one->after) {
    if (one->node.operation == nullptr || !has_storage(one)) continue;
    held.push_back(reinterpret_cast<PyObject*>(one));
    stack.push_back(reinterpret_cast<PyObject*>(one));
    while (!stack.empty()) {
      PyObject* node = stack.back();
      stack.pop_back();
      for (PyObject* source : operation.inputs(version.operation.get(node))) {
        if (version.operation.is_none(source)) {
          bool is_here = !version.superseded.is_true(source) && version.resident.is_true(source);
          if (!is_here || version.escaped.is_true(source)) continue;
          if (is_weight(version.pin.get(source))) {
            weights.insert(source);
            groups.join(node, source);
          } else if (version.nbytes.number(source) <= SMALL) {
            others.emplace_back(source, node);
          }
        } else if (version.superseded.is_true(source) || !has_storage(as_stored(source))) {  // released
          groups.join(node, source);
          if (seen.insert(source).second) stack.push_back(source);
        }
      }
    }
  }
  std::unordered_map<PyObject*, int64_t> balance;
  for (PyObject* one : held) balance[groups.of(one)] += version.nbytes.number(one);
  std::map<std::pair<PyObject*, int64_t>, int64_t> read;
  for (PyObject* one : weights) read[{groups.of(one), version.key.number(one)}] = version.nbytes.number(one);
  for (auto [one, reader] : others) read[{groups.of(reader), version.key.number(one)}] = version.nbytes.number(one);
  for (const auto& [place, nbytes] : read) balance[place.first] -= nbytes << SHARE_SHIFT;
  Ref chosen = checked(PySet_New(nullptr));
  for (const auto& [place, nbytes] : read) {
    if (balance[place.first] < 0) continue;
    Ref key(PyLong_FromLongLong(place.second));
    if (PySet_Add(chosen.get(), key.get()) < 0) raise();
  }
  auto looked_at = static_cast<long long>(accounts.versions().size() + seen.size());
  return checked(Py_BuildValue("(OL)", chosen.get(), looked_at));
}

}  // namespace dtrrun
