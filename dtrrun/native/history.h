// Which recipes go at the end of a step, as core/history.py says: those that would need storages older than the last cut
// (`History._carried`), or that have lost an input (`History._mutated`).
//
// No code of Python's runs meanwhile, so the versions, and what they were computed from, stay as they are.
#pragma once

#include <unordered_map>
#include <unordered_set>

#include "ledger.h"

namespace dtrrun {

// Looks through what would be needed to recompute versions: `_found` in core/history.py.
class Ancestry {
 public:
  enum class Verdict { NO, YES, ASK_ITS_INPUTS };

  // Whether the verdict of `judge` on anything that is needed for `wanted` is YES.
  template <class Judge>
  bool any(PyObject* wanted, const Judge& judge) {
    if (auto known = known_.find(wanted); known != known_.end()) return known->second;
    std::vector<Frame> stack{{wanted}};
    while (!stack.empty()) {
      Frame& frame = stack.back();
      Reads inputs = operation_.inputs(version_.operation.get(frame.node));
      PyObject* deeper = nullptr;
      bool found = false;
      while (frame.next < inputs.size() && deeper == nullptr && !found) {
        PyObject* source = inputs[frame.next++];
        Verdict verdict = judge(source);
        if (verdict == Verdict::YES) {
          found = true;
        } else if (verdict == Verdict::ASK_ITS_INPUTS) {
          auto known = known_.find(source);
          if (known == known_.end())
            deeper = source;
          else
            found = known->second;
        }
      }
      if (found) {
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

 private:
  struct Frame {
    PyObject* node;
    Py_ssize_t next = 0;  // of its inputs
  };
  std::unordered_map<PyObject*, bool> known_;
  VersionFields version_;
  OperationFields operation_;
};

// The versions since `age` that have a recipe and are `wanted`, the youngest first.
template <class Wanted>
Ref recomputable_since(const Versions& versions, int64_t age, const Wanted& wanted) {
  Ref all = checked(PyList_New(0));
  for (StoredVersion* one = versions.last(); one != nullptr; one = one->before) {
    if (one->node.age < age && one->mutations == 0) break;  // older ones come next
    auto* version = reinterpret_cast<PyObject*>(one);
    if (one->node.operation != nullptr && wanted(version) && PyList_Append(all.get(), version) < 0) raise();
  }
  return all;
}

inline Ref carried(const Versions& versions, int64_t cut_age) {
  using Verdict = Ancestry::Verdict;
  VersionFields version;
  Ancestry ancestry;
  return recomputable_since(versions, cut_age, [&](PyObject* one) {
    if (version.locks.number(one) != 0) return false;
    return ancestry.any(one, [&](PyObject* source) {
      bool has_it = !version.superseded.is_true(source) && Accounts::has_storage(source);
      if (has_it) return Verdict::NO;  // what the program still has is judged by itself
      if (version.operation.is_none(source)) return Verdict::NO;
      return version.age.number(source) < cut_age ? Verdict::YES : Verdict::ASK_ITS_INPUTS;
    });
  });
}

// trusted: `Foreign.trusted()`, a list.
inline Ref mutated(const Accounts& accounts, int64_t age, PyObject* trusted) {
  using Verdict = Ancestry::Verdict;
  VersionFields version;
  OperationFields operation;
  Ancestry ancestry;
  std::unordered_set<PyObject*> constants;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(trusted); i++) constants.insert(PyList_GET_ITEM(trusted, i));
  auto is_secured = [&](PyObject* one) { return operation.secured.is_true(version.operation.get(one)); };
  auto is_there = [&](PyObject* constant) {
    if (!version.resident.is_true(constant) || !accounts.memory_of(constant)) return false;
    return !version.escaped.is_true(constant) || constants.count(constant) != 0;
  };
  return recomputable_since(accounts.versions(), age, [&](PyObject* one) {
    if (!version.resident.is_true(one) || !Accounts::has_storage(one) || is_secured(one)) return false;
    return ancestry.any(one, [&](PyObject* source) {
      if (version.operation.is_none(source)) return is_there(source) ? Verdict::NO : Verdict::YES;
      return is_secured(source) ? Verdict::NO : Verdict::ASK_ITS_INPUTS;
    });
  });
}

}  // namespace dtrrun
