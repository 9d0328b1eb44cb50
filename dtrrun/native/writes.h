// What a call on the fast path writes to: what depends on it, and whether it can be recomputed afterwards (`core/mutation.h`).
#pragma once

#include <unordered_set>

#include "fast_call.h"

namespace dtrrun {

class Writes {
 public:
  // shared: whether operators of several threads may be under way.
  Writes(TensorVersions& versions, const bool& shared) : versions_(versions), core_(versions.core), shared_(shared) {}

  // `Operators::prepare_writes`, before room is made: a leaf, or state that persists over steps, is a constant from now on,
  // and what depends on a constant is rescued. Returns false if that is for Python.
  bool prepare_writes(FastCall& call) {
    for (FastCall::Write& one : call.written) {
      at::Tensor tensor = call.tensor(one);
      one.target = call.inputs[one.input].get();
      bool leaf = is_leaf(tensor), constant = version.operation.is_none(one.target);
      if (leaf && version.pin.is_none(one.target)) return false;  // Python meets it
      if (leaf) version.pin.set(one.target, pins::PARAMETER);
      one.overwrites = !leaf && !(constant && Mutation::is_sticky(node_of(one.target)->pin)) && overwrites(call.info, tensor, one.target, [&] {
        auto is_it = [&](const Ref& other) { return other.get() == one.target; };
        return std::count_if(call.inputs.begin(), call.inputs.end(), is_it);
      });
      call.recordable = call.recordable && (constant ? one.overwrites : !leaf && is_recent(one.target));
    }
    for (FastCall::Write& one : call.written) {
      bool constant = version.operation.is_none(one.target);
      if ((constant ? !node_of(one.target)->copy : !call.recordable) && versions_.may_be_copied(one.target)) return false;
      if (!constant && !call.recordable && !call.inputs_resident) return false;
    }
    for (FastCall::Write& one : call.written) {
      if (!call.recordable) {
        one.overwrites = false;
        if (!version.operation.is_none(one.target)) core_.recipes.make_constant(node_of(one.target), pins::UPDATED_IN_PLACE);
        Mutation::no_longer_blank(node_of(one.target));
      }
      if (!version.operation.is_none(one.target) || is_safe_to_change(one.target)) continue;
      if (!call.inputs_resident || !core_.rescue.resident_dependents_of(node_of(one.target))) return false;
    }
    return true;
  }
  // The same for running statistics, as in `Operators::admit`.
  bool prepare_statistics(const FastCall& call) {
    for (const Ref& one : call.statistics) {
      if (!call.inputs_resident && !is_free(one.get())) return false;
      if (versions_.may_be_copied(one.get())) return false;
      core_.recipes.make_constant(node_of(one.get()), pins::RUNNING_STATISTICS);
      if (!core_.rescue.resident_dependents_of(node_of(one.get()))) return false;
    }
    return true;
  }
  // Whether nothing has come to depend on these since, for which room was made.
  bool are_free(const c10::SmallVector<Ref, 2>& statistics) const {
    return std::all_of(statistics.begin(), statistics.end(), [&](const Ref& one) { return is_free(one.get()); });
  }
  // Finds the versions that a call writes to, once there is room. Returns false if that is not for the fast path.
  bool find_targets(FastCall& call) {
    std::unordered_set<PyObject*> distinct;
    for (const FastCall::Write& one : call.written) {
      bool constant = version.operation.is_none(one.target);
      if (is_in_use(one.target) || (call.info.makes_tensors && constant)) return false;
      if (constant ? (call.recordable && !one.overwrites) || !is_safe_to_change(one.target)
                   : !may_be_recorded(one.target, call.tensor(one)))
        return false;
      if (call.written.size() == 1 || distinct.insert(one.target).second) call.targets.push_back(one);
    }
    return true;
  }
  // The same for one that writes to a list of them, which all can be recomputed.
  bool find_list(FastCall& call) {
    if (call.written.empty()) return true;
    auto tensors = call.argument(call.written[0].place).toTensorVector();
    std::unordered_set<PyObject*> distinct;
    for (size_t i = 0; i < tensors.size(); i++) {
      FastCall::Write one = call.written[i];
      one.target = call.inputs[one.input].get();
      if (is_in_use(one.target) || version.operation.is_none(one.target) || !may_be_recorded(one.target, tensors[i])) return false;
      if (!distinct.insert(one.target).second) return false;
      call.targets.push_back(one);
    }
    return true;
  }

  // Whether overwriting this tensor leaves nothing that can be known of what its storage held (`TensorCall.overwrites`).
  // target: its version. times: how many of the call's tensors have it.
  template <class Count>
  static bool overwrites(const OperatorInfo& info, const at::Tensor& tensor, PyObject* target, const Count& times) {
    if (info.blank && node_of(target)->pin == pins::UNINITIALISED) return true;
    return info.overwrites && times() == 1 && tensor.nbytes() == tensor.storage().nbytes() && tensor.is_non_overlapping_and_dense();
  }

 private:
  bool is_free(PyObject* constant) const {
    return version.operation.is_none(constant) && version.needed_by.is_none(constant) && !is_in_use(constant);
  }
  // Whether nothing depends on what a constant holds, unless that has been copied.
  bool is_safe_to_change(PyObject* constant) const {
    return version.needed_by.is_none(constant) || node_of(constant)->copy;
  }
  // Whether an operator of another thread that is under way uses this memory.
  bool is_in_use(PyObject* one) const { return shared_ && version.locks.number(one) != 0; }
  // Whether what can be recomputed may still be, once it has been written to.
  bool may_be_recorded(PyObject* target, const at::Tensor& tensor) const { return is_recent(target) && !is_leaf(tensor); }
  // Whether its history is worth keeping.
  bool is_recent(PyObject* target) const {
    return core_.mutation.is_recent(node_of(target));
  }

  TensorVersions& versions_;
  Core& core_;
  const bool& shared_;
  VersionFields version;
};

}  // namespace dtrrun
