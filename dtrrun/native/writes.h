// What a call on the fast path writes to: what depends on it, and whether it can be recomputed afterwards (`core/mutation.h`).
#pragma once

#include <unordered_set>

#include "fast_call.h"

namespace dtrrun {

class Writes {
 public:
  // shared: whether operators of several threads may be under way.
  Writes(TensorVersions& versions, const bool& shared) : versions_(versions), core_(versions.core), shared_(shared) {}

  // `Mutation.prepare_writes`, before room is made: a leaf, or state that persists over steps, is a constant from now on,
  // and what depends on a constant is rescued. Returns false if that is for Python.
  bool prepare_write(FastCall& call) {
    if (call.hole < 0) return false;
    PyObject* target = call.inputs[call.hole].get();
    bool leaf = is_leaf(call.argument(call.info.written).toTensor());
    if (leaf && version.pin.is_none(target)) return false;  // Python meets it
    bool changes = version.operation.is_none(target) || leaf || !is_recent(target);
    if (changes && versions_.may_be_copied(target)) return false;
    if (!version.operation.is_none(target) && (leaf || !is_recent(target))) {
      if (!call.inputs_resident) return false;
      core_.recipes.make_constant(node_of(target), pins::UPDATED_IN_PLACE);
      call.settles = true;
    }
    if (leaf) version.pin.set(target, pins::PARAMETER);
    if (!version.operation.is_none(target) || version.needed_by.is_none(target)) return true;
    return call.inputs_resident && core_.rescue.resident_dependents_of(node_of(target));
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
  // Finds the version that an in-place operator writes to. Returns false if that is not for the fast path.
  bool find_target(FastCall& call) {
    PyObject* target = call.inputs[call.hole].get();
    const at::Tensor& tensor = call.argument(call.info.written).toTensor();
    if (is_in_use(target) || (call.info.makes_tensors && version.operation.is_none(target))) return false;
    call.targets.push_back(target);
    bool constant = version.operation.is_none(target);
    bool stays = call.settles || (constant && is_sticky(target));
    call.overwrites = call.info.overwrites && !stays && overwrites_all(tensor, call);
    return constant ? version.needed_by.is_none(target) : may_be_recorded(target, tensor);
  }
  // The same for one that writes to a list of them, which all can be recomputed.
  bool find_targets(FastCall& call) {
    auto tensors = call.argument(0).toTensorVector();
    for (size_t i = 0; i < tensors.size(); i++) {
      PyObject* target = call.inputs[i].get();
      if (is_in_use(target) || version.operation.is_none(target) || !may_be_recorded(target, tensors[i])) return false;
      call.targets.push_back(target);
    }
    return std::unordered_set(call.targets.begin(), call.targets.end()).size() == tensors.size();
  }

 private:
  bool is_free(PyObject* constant) const {
    return version.operation.is_none(constant) && version.needed_by.is_none(constant) && !is_in_use(constant);
  }
  // Whether an operator of another thread that is under way uses this memory.
  bool is_in_use(PyObject* one) const { return shared_ && version.locks.number(one) != 0; }
  // Whether what can be recomputed may still be, once it has been written to.
  bool may_be_recorded(PyObject* target, const at::Tensor& tensor) const { return is_recent(target) && !is_leaf(tensor); }
  // Whether its history is worth keeping.
  bool is_recent(PyObject* target) const {
    return core_.mutation.is_recent(node_of(target));
  }

  // Whether overwriting this tensor leaves nothing of what its storage held, which no other argument of the call has
  // (`TensorCall.overwrites`).
  static bool overwrites_all(const at::Tensor& tensor, const FastCall& call) {
    PyObject* target = call.inputs[0].get();
    for (size_t i = 1; i < call.inputs.size(); i++)
      if (call.inputs[i].get() == target) return false;
    return tensor.nbytes() == tensor.storage().nbytes() && tensor.is_non_overlapping_and_dense();
  }
  // Whether a constant remains one when all of it is overwritten.
  static bool is_sticky(PyObject* target) { return Mutation::is_sticky(node_of(target)->pin); }

  TensorVersions& versions_;
  Core& core_;
  const bool& shared_;
  VersionFields version;
};

}  // namespace dtrrun
