// Splits calls of operators on lists of tensors that do not fit into the budget as a whole.
//
// An optimizer passes all weights, gradients and states to one operator (`fused`, `foreach`), which needs them in memory at the same
// time. These operators handle one place of their lists after the other, so calls with parts of the lists compute the same.
#pragma once

#include <algorithm>

#include "arrival.h"
#include "../core/splitting.h"
#include "tensor_versions.h"

namespace dtrrun {

// The lists among a call's arguments.
struct ListsOfCall {
  c10::SmallVector<c10::ArrayRef<IValue>, 6> tensors;
  size_t length = 0;  // of all of them; 0 if their lengths differ, or none is of tensors

  ListsOfCall(const IValue* values, size_t count) {
    for (const IValue& value : c10::ArrayRef<IValue>(values, count)) {
      if (!value.isList() || value.toListRef().empty()) continue;
      if (length != 0 && value.toListRef().size() != length) {
        tensors.clear();
        break;
      }
      length = value.toListRef().size();
      if (value.isTensorList()) tensors.push_back(value.toListRef());
    }
    if (tensors.empty()) length = 0;
  }
  // Returns whether an operator handles parts of the lists as it does the whole. On a GPU, lists of tensors that are alike take another
  // kernel than others: a part of the others might be alike.
  bool are_alike() const { return tensors[0][0].toTensor().is_cpu() || std::all_of(tensors.begin(), tensors.end(), is_alike); }

 private:
  static bool is_alike(c10::ArrayRef<IValue> list) {
    const at::Tensor first = list[0].toTensor();
    return std::all_of(list.begin(), list.end(), [&](const IValue& value) {
      const at::Tensor& one = value.toTensor();
      return one.defined() && one.scalar_type() == first.scalar_type() && one.device() == first.device() && one.is_contiguous();
    });
  }
};

class SplitLists {
 public:
  explicit SplitLists(TensorVersions& versions) : versions_(versions), ledger_(versions.ledger) {}

  // Runs a call in parts, each of which arrives by itself, if it does not fit as a whole. Returns whether it has done so.
  bool run(Arrival& arrival) {
    if (busy_) return false;
    {
      Off off;
      ledger_.collect_dead();
    }
    std::vector<size_t> parts = ends_of(arrival);
    if (parts.empty()) return false;
    struct Busy {
      Busy() { busy_ = true; }
      ~Busy() { busy_ = false; }
    } now;
    Stack all = arrival.copied();
    bool returns = !arrival.schema().returns().empty();
    c10::List<at::Tensor> results;
    size_t begin = 0;
    for (size_t end : parts) {
      Stack stack;
      for (const IValue& value : all) stack.push_back(part_of(value, begin, end));
      arrival.op.redispatchBoxed(arrival.keys, &stack);
      if (returns)
        for (const IValue& one : stack.back().toListRef()) results.push_back(one.toTensor());
      begin = end;
    }
    Stack made;
    if (returns) made.emplace_back(std::move(results));
    arrival.set_results(std::move(made));
    return true;
  }

 private:
  static IValue part_of(const IValue& value, size_t begin, size_t end) {
    if (!value.isList() || value.toListRef().empty()) return value;
    if (value.isTensorList()) {
      c10::List<at::Tensor> part;
      for (size_t i = begin; i < end; i++) part.push_back(value.toListRef()[i].toTensor());
      return part;
    }
    c10::impl::GenericList whole = value.toList(), part(whole.elementType());
    for (size_t i = begin; i < end; i++) part.push_back(whole.get(i));
    return part;
  }

  // Returns where the parts of a call end; none if it fits, or can't be split.
  std::vector<size_t> ends_of(Arrival& arrival) const {
    ListsOfCall lists(arrival.values(), arrival.count);
    bool returns = !arrival.schema().returns().empty();
    auto each = [&](size_t place, const auto& function) {
      for (auto list : lists.tensors) function(version_of(list[place]));
    };
    return parts_of(ledger_, lists.length, returns, each, [&] { return lists.are_alike(); });
  }
  const Version* version_of(const IValue& value) const {
    const at::Tensor& tensor = value.toTensor();
    return is_plain(tensor) ? versions_.of(tensor) : nullptr;
  }

  TensorVersions& versions_;
  Ledger& ledger_;
  static inline thread_local bool busy_ = false;
};

}  // namespace dtrrun
