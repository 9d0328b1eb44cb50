// Splits calls of operators on lists of tensors that do not fit into the budget as a whole.
//
// An optimizer passes all weights, gradients and states to one operator (`fused`, `foreach`), which needs them in memory at the same
// time. These operators handle one place of their lists after the other, so calls with parts of the lists compute the same.
#pragma once

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_set>

#include "arrival.h"
#include "tensor_versions.h"

namespace dtrrun {

class SplitLists {
 public:
  explicit SplitLists(TensorVersions& versions) : versions_(versions), ledger_(versions.ledger) {}

  // Returns whether an operator handles each place of its lists by itself.
  static bool can_split(const c10::FunctionSchema& schema) {
    constexpr std::string_view STARTS[] = {"aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad",
                                           "aten::_amp_foreach_"};
    const std::string& name = schema.name();
    if (std::none_of(std::begin(STARTS), std::end(STARTS), [&](auto start) { return name.rfind(start, 0) == 0; })) return false;
    // Others return more than one list, or read a tensor with a number for each place.
    if (schema.returns().size() > 1 || (schema.returns().size() == 1 && !is_list(*schema.returns()[0].type()))) return false;
    return std::none_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& one) {
      return one.name() == "scalars" && one.type()->kind() == c10::TypeKind::TensorType;
    });
  }

  // Runs a call in parts, each of which arrives by itself, if it does not fit as a whole. Returns whether it has done so.
  bool run(Arrival& arrival) {
    if (busy_) return false;
    ledger_.some_died();  // reports deaths to the table
    auto parts = parts_of(arrival);
    if (!parts) return false;
    struct Busy {
      Busy() { busy_ = true; }
      ~Busy() { busy_ = false; }
    } now;
    Stack all = arrival.copied();
    bool returns = !arrival.schema().returns().empty();
    c10::List<at::Tensor> results;
    size_t begin = 0;
    for (size_t end : *parts) {
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
  static constexpr int PART_SHIFT = 2;  // a part takes at most a quarter of the limit, unless it is a single place

  static bool is_list(const c10::Type& type) { return type.kind() == c10::TypeKind::ListType; }

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

  // Returns where the parts of a call end; nullopt if it fits, or can't be split.
  std::optional<std::vector<size_t>> parts_of(Arrival& arrival) const {
    c10::ArrayRef<IValue> values(arrival.values(), arrival.count);
    c10::SmallVector<c10::ArrayRef<IValue>, 6> lists;  // of tensors
    size_t count = 0;
    for (const IValue& value : values) {
      if (!value.isList() || value.toListRef().empty()) continue;
      if (count != 0 && value.toListRef().size() != count) return std::nullopt;
      count = value.toListRef().size();
      if (value.isTensorList()) lists.push_back(value.toListRef());
    }
    if (count < 2 || lists.empty()) return std::nullopt;
    bool returns = !arrival.schema().returns().empty(), resident = true;
    if (!returns && ledger_.evicted_bytes == 0) return std::nullopt;
    std::vector<size_t> ends;
    int64_t most = ledger_.limit >> PART_SHIFT, made = 0, total = 0, part = 0;
    for (size_t i = 0; i < count; i++) {
      int64_t nbytes = 0;
      for (auto list : lists) {
        const Version* one = version_of(list[i]);
        if (one == nullptr) return std::nullopt;  // it has not been met
        resident = resident && one->resident;
        nbytes += one->nbytes;
      }
      if (returns) {  // a result for each tensor of the first list
        int64_t result = version_of(lists[0][i])->nbytes;
        nbytes += result;
        made += result;
      }
      if (part != 0 && part + nbytes > most) {
        ends.push_back(i);
        part = 0;
      }
      part += nbytes;
      total += nbytes;
    }
    if (ends.empty() || (resident && ledger_.resident_bytes + made <= ledger_.limit)) return std::nullopt;
    // On a GPU, lists of tensors that are alike take another kernel than others: a part of the others might be alike.
    if (!lists[0][0].toTensor().is_cpu() && !std::all_of(lists.begin(), lists.end(), are_alike)) return std::nullopt;
    if (!ledger_.constants_leave) {
      if (total + others(lists) <= ledger_.limit) return std::nullopt;
      ledger_.let_constants_leave();
      ledger_.backend.constants_leave();
    }
    ends.push_back(count);
    return ends;
  }
  const Version* version_of(const IValue& value) const {
    const at::Tensor& tensor = value.toTensor();
    return is_plain(tensor) ? versions_.of(tensor) : nullptr;
  }
  // Returns the bytes of the constants in memory that are in none of these lists.
  int64_t others(c10::ArrayRef<c10::ArrayRef<IValue>> lists) const {
    std::unordered_set<const Version*> listed;
    for (auto list : lists)
      for (const IValue& value : list) listed.insert(version_of(value));
    int64_t nbytes = 0;
    for (const Version* one : ledger_.versions.all())
      if (one->resident && one->constant() && listed.count(one) == 0) nbytes += one->nbytes;
    return nbytes;
  }
  static bool are_alike(c10::ArrayRef<IValue> list) {
    const at::Tensor first = list[0].toTensor();
    return std::all_of(list.begin(), list.end(), [&](const IValue& value) {
      const at::Tensor& one = value.toTensor();
      return one.defined() && one.scalar_type() == first.scalar_type() && one.device() == first.device() && one.is_contiguous();
    });
  }

  TensorVersions& versions_;
  Ledger& ledger_;
  static inline thread_local bool busy_ = false;
};

}  // namespace dtrrun
