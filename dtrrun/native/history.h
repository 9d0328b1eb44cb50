// What would be recomputed from storages older than the last cut: `History._carried` in core/history.py.
#pragma once

#include <unordered_map>

#include "ledger.h"

namespace dtrrun {

class Carried {
 public:
  Carried(const Versions& versions, int64_t cut_age) : cut_age_(cut_age) {
    for (VersionObject* one = versions.last(); one != nullptr; one = one->before) {
      if (one->age < cut_age_ && one->mutations == 0) break;  // older ones come next
      if (one->operation == nullptr || one->locks != 0) continue;
      auto* version = reinterpret_cast<PyObject*>(one);
      if (reaches_back(version)) found_.push_back(version);
    }
  }

  // The youngest first.
  Ref list() const {
    Ref all = checked(PyList_New(static_cast<Py_ssize_t>(found_.size())));
    for (size_t i = 0; i < found_.size(); i++) PyList_SET_ITEM(all.get(), i, Ref::copy(found_[i]).release());
    return all;
  }

 private:
  struct Frame {
    PyObject* node;
    Py_ssize_t next = 0;  // of its inputs
  };

  // `History._reaches_back`. Storages that the program still has are judged by themselves.
  bool reaches_back(PyObject* wanted) {
    if (auto known = known_.find(wanted); known != known_.end()) return known->second;
    std::vector<Frame> stack{{wanted}};
    while (!stack.empty()) {
      Frame& frame = stack.back();
      Items inputs = operation_.inputs(version_.operation.get(frame.node));
      PyObject* deeper = nullptr;
      bool back = false;
      while (frame.next < inputs.size() && deeper == nullptr && !back) {
        PyObject* source = inputs[frame.next++];
        if (!version_.superseded.is_true(source) && Accounts::storage_of(source) != nullptr) continue;
        if (version_.operation.is_none(source)) continue;
        if (auto known = known_.find(source); known != known_.end())
          back = known->second;
        else if (version_.age.number(source) < cut_age_)
          back = known_[source] = true;
        else
          deeper = source;
      }
      if (back) {
        for (const Frame& one : stack) known_[one.node] = true;
        return true;
      }
      if (deeper != nullptr) {
        stack.push_back({deeper});
      } else {
        known_[frame.node] = false;
        stack.pop_back();
      }
    }
    return false;
  }

  int64_t cut_age_;
  std::vector<PyObject*> found_;
  std::unordered_map<PyObject*, bool> known_;
  VersionFields version_;
  OperationFields operation_;
};

}  // namespace dtrrun
