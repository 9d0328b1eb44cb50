// An optimizer's operators on lists of tensors, in the simple case: everything that they read is resident, and what they write
// to stays resident, without recipes.
#pragma once

#include <map>
#include <optional>

#include "operator_info.h"
#include "tensor_versions.h"

namespace dtrrun {

class ListUpdates {
 public:
  explicit ListUpdates(TensorVersions& versions) : versions_(versions), core_(versions.core), ledger(versions.ledger) {}

  // Calls of the same kind cost about the same.
  struct Kind {
    const OperatorInfo* info;
    size_t tensors;
    int64_t nbytes;
    uint64_t dtypes;  // a bit for each: complex numbers take longer than others of the same bytes

    void add(const Version* one, const at::Tensor& tensor) {
      tensors++;
      nbytes += one->nbytes;
      dtypes |= uint64_t{1} << static_cast<int>(tensor.scalar_type());
    }
    auto operator<=>(const Kind&) const = default;
  };
  // Returns the kind of a call; nullopt if a tensor has no version.
  std::optional<Kind> kind_of(const OperatorInfo& info, const IValue* values, size_t count) const {
    Kind kind{&info, 0, 0, 0};
    auto add = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return true;
      const Version* one = versions_.of(tensor);
      if (one == nullptr) return false;
      kind.add(one, tensor);
      return true;
    };
    for (const IValue& value : c10::ArrayRef<IValue>(values, count)) {
      if (value.isTensor() && !add(value.toTensor())) return std::nullopt;
      if (!value.isTensorList()) continue;
      for (const IValue& item : value.toListRef())
        if (!add(item.toTensor())) return std::nullopt;
    }
    return kind;
  }
  // Such a call has run, on the longer way: the next ones may come here.
  void learn(const Kind& kind, PyObject* signature) {
    if (known_.size() >= MOST) known_.clear();
    known_[kind] = Ref::copy(signature);
  }
  void forget_kinds() { known_.clear(); }

  // Finds what the call reads and writes. Returns false if the call has to take the general path. If the only reason is a dependent
  // that could not be rescued, what the call writes to has become constant already, as it would there.
  bool prepare(const OperatorInfo& info, const c10::FunctionSchema& schema, const IValue* values) {
    forget();  // left by a call that was interrupted
    bool found = look(info, schema, values);
    if (!found) forget();  // above all, the program's tensors
    return found;
  }

  // Returns the signature of the prepared call (borrowed).
  PyObject* prepared() const { return signature_.get(); }

  // The operator has run.
  void finish(int64_t cost) {
    ledger.ran(as_signature(signature_.get())->figures, cost);
    for (const VersionRef& target : targets_)
      if (target->used && !target->superseded) core_.recipes.supersede(target.get(), nullptr, 0);
    forget();
  }
  // It has failed, and may have written something.
  void fail() {
    for (const VersionRef& target : targets_) core_.recipes.half_written(target.get());
    forget();
  }

 private:
  bool look(const OperatorInfo& info, const c10::FunctionSchema& schema, const IValue* values) {
    ledger.collect_dead();
    loose_.clear();
    Kind kind{&info, 0, 0, 0};
    int64_t clock = ledger.clock;
    for (size_t place = 0; place < schema.arguments().size(); place++) {
      const IValue& value = values[place];
      bool writes = std::find(info.mutates.begin(), info.mutates.end(), place) != info.mutates.end();
      if (value.isTensor()) {
        if (value.toTensor().defined() && !add(value.toTensor(), writes, kind)) return false;
      } else if (schema.arguments()[place].kwarg_only()) {
        if (value.isList()) return false;
      } else if (value.isTensorList()) {
        for (const IValue& tensor : value.toListRef())
          if (!add(tensor.toTensor(), writes, kind)) return false;
      } else if (value.isOptionalTensorList()) {
        return false;
      }
    }
    auto known = known_.find(kind);
    if (known == known_.end()) return false;
    signature_ = Ref::copy(known->second.get());
    int64_t made = as_signature(signature_.get())->figures.output_bytes;
    if (made != 0 && ledger.resident_bytes + made > ledger.limit) return false;
    for (Version* one : found_) {
      if (!one->resident) return false;
      one->last_access = clock;
    }
    for (size_t i = 0; i < targets_.size(); i++) {
      Version* target = targets_[i].get();
      if (may_be_copied(target)) return false;
      if (target->constant()) continue;
      if (written_[i].requires_grad()) return false;
      loose_.push_back(target);
    }
    if (loose_.size() == targets_.size()) return false;  // all may need a recipe
    for (const VersionRef& target : targets_) Mutation::no_longer_blank(target.get());
    for (Version* one : loose_) core_.recipes.make_constant(one, pins::UPDATED_IN_PLACE);
    for (const VersionRef& target : targets_) Ledger::forget_host_copy(target.get());
    for (const VersionRef& target : targets_)
      if (!core_.rescue.resident_dependents_of(target.get())) return false;
    return true;
  }

  // Returns true if a version that is about to be written to has a copy, or may be worth one.
  bool may_be_copied(const Version* one) {
    if (one->copy) return true;
    if (!ledger.pressure || !one->used) return false;
    return !one->constant() || core_.copies.wants(one);  // or it is about to become a constant
  }

  bool add(const at::Tensor& tensor, bool writes, Kind& kind) {
    if (!is_plain(tensor)) return false;
    Version* one = versions_.of(tensor);
    if (one == nullptr || one->away) return false;
    found_.push_back(one);
    kind.add(one, tensor);
    if (!writes) return true;
    written_.push_back(tensor);
    targets_.emplace_back(one);
    return true;
  }
  void forget() {
    written_.clear();
    targets_.clear();
    found_.clear();
  }

  static constexpr size_t MOST = 10'000;  // a program whose lists never repeat: start over rather than grow forever

  std::map<Kind, Ref> known_;
  Ref signature_;
  TensorVersions& versions_;
  Core& core_;
  Ledger& ledger;
  std::vector<Version*> found_, loose_;  // of all its tensors; those that are written to and have a recipe
  std::vector<VersionRef> targets_;       // of those that are written to
  std::vector<at::Tensor> written_;
};

}  // namespace dtrrun
