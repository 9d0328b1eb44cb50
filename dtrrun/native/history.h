// What loses its recipe at the end of a step, as core/history.py says: it would be recomputed from storages older than
// the last cut (`History._carried`), or from weights that have changed since (`History._mutated`).
#pragma once

#include <unordered_map>

#include "ledger.h"

namespace dtrrun {

class Doomed {
 public:
  // The youngest first.
  Ref list() const {
    Ref all = checked(PyList_New(static_cast<Py_ssize_t>(found_.size())));
    for (size_t i = 0; i < found_.size(); i++) PyList_SET_ITEM(all.get(), i, Ref::copy(found_[i]).release());
    return all;
  }

 protected:
  enum class Verdict { NO, YES, ASK_ITS_INPUTS };

  // Calls `visit` with the versions since `age`, the youngest first.
  template <class Visit>
  static void each_since(const Versions& versions, int64_t age, const Visit& visit) {
    for (VersionObject* one = versions.last(); one != nullptr; one = one->before) {
      if (one->age < age && one->mutations == 0) break;  // older ones come next
      if (one->operation != nullptr) visit(reinterpret_cast<PyObject*>(one));
    }
  }

  // Whether the verdict on anything that is needed to recompute `wanted` is YES: `_found` in core/history.py.
  template <class Judge>
  bool any_input(PyObject* wanted, const Judge& judge) {
    if (auto known = known_.find(wanted); known != known_.end()) return known->second;
    std::vector<Frame> stack{{wanted}};
    while (!stack.empty()) {
      Frame& frame = stack.back();
      Items inputs = operation_.inputs(version_.operation.get(frame.node));
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

  std::vector<PyObject*> found_;
  VersionFields version_;
  OperationFields operation_;

 private:
  struct Frame {
    PyObject* node;
    Py_ssize_t next = 0;  // of its inputs
  };
  std::unordered_map<PyObject*, bool> known_;
};

class Carried : public Doomed {
 public:
  Carried(const Versions& versions, int64_t cut_age) {
    each_since(versions, cut_age, [&](PyObject* one) {
      if (version_.locks.number(one) == 0 && reaches_back(one, cut_age)) found_.push_back(one);
    });
  }

 private:
  // `History._reaches_back`. Storages that the program still has are judged by themselves.
  bool reaches_back(PyObject* wanted, int64_t cut_age) {
    return any_input(wanted, [&](PyObject* source) {
      if (!version_.superseded.is_true(source) && Accounts::storage_of(source) != nullptr) return Verdict::NO;
      if (version_.operation.is_none(source)) return Verdict::NO;
      return version_.age.number(source) < cut_age ? Verdict::YES : Verdict::ASK_ITS_INPUTS;
    });
  }
};

class Mutated : public Doomed {
 public:
  // trusts: `Foreign.trusts`.
  Mutated(const Accounts& accounts, int64_t age, PyObject* trusts) : accounts_(accounts), trusts_(trusts) {
    each_since(accounts.versions(), age, [&](PyObject* one) {
      if (version_.resident.is_true(one) && Accounts::storage_of(one) != nullptr && is_broken(one)) found_.push_back(one);
    });
  }

 private:
  // `not History._is_intact`.
  bool is_broken(PyObject* wanted) {
    if (operation_.secured.is_true(version_.operation.get(wanted))) return false;
    return any_input(wanted, [&](PyObject* source) {
      if (version_.operation.is_none(source)) return is_there(source) ? Verdict::NO : Verdict::YES;
      return operation_.secured.is_true(version_.operation.get(source)) ? Verdict::NO : Verdict::ASK_ITS_INPUTS;
    });
  }
  // Whether a constant still is what it was.
  bool is_there(PyObject* constant) const {
    if (!version_.resident.is_true(constant) || accounts_.memory_of(constant) == nullptr) return false;
    if (!version_.escaped.is_true(constant)) return true;
    return PyObject_IsTrue(checked(PyObject_CallOneArg(trusts_, constant)).get()) == 1;
  }

  const Accounts& accounts_;
  PyObject* trusts_;
};

}  // namespace dtrrun
