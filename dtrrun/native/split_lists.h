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
    const IValue* values = arrival.values();
    size_t count = 0;
    bool alike = true;
    for (size_t place = 0; place < arrival.count; place++) {
      if (!values[place].isList() || values[place].toListRef().empty()) continue;
      size_t size = values[place].toListRef().size();
      if (count != 0 && size != count) return std::nullopt;
      count = size;
      if (values[place].isTensorList()) alike = alike && are_alike(values[place].toListRef());
    }
    if (count < 2) return std::nullopt;
    std::vector<size_t> ends;
    std::unordered_set<const Version*> listed;
    int64_t most = ledger_.limit >> PART_SHIFT, total = 0, part = 0;
    bool resident = true, is_cpu = true;
    for (size_t i = 0; i < count; i++) {
      int64_t nbytes = 0, made = 0;
      for (size_t place = 0; place < arrival.count; place++) {
        if (!values[place].isTensorList() || values[place].toListRef().empty()) continue;
        const at::Tensor& tensor = values[place].toListRef()[i].toTensor();
        const Version* one = tensor.defined() && is_plain(tensor) ? versions_.of(tensor) : nullptr;
        if (one == nullptr) return std::nullopt;  // it has not been met
        nbytes += one->nbytes;
        listed.insert(one);
        if (made == 0) made = one->nbytes;
        resident = resident && one->resident;
        is_cpu = is_cpu && tensor.is_cpu();
      }
      if (!arrival.schema().returns().empty()) nbytes += made;
      if (part != 0 && part + nbytes > most) {
        ends.push_back(i);
        part = 0;
      }
      part += nbytes;
      total += nbytes;
    }
    // On a GPU, lists of tensors that are alike take another kernel than others: a part of the others might be alike.
    if (ends.empty() || !(is_cpu || alike)) return std::nullopt;
    if (resident && ledger_.constants_leave && arrival.schema().returns().empty()) return std::nullopt;
    if (!ledger_.constants_leave) {
      if (total + others(listed) <= ledger_.limit) return std::nullopt;
      ledger_.let_constants_leave();
      ledger_.backend.constants_leave();
    }
    ends.push_back(count);
    return ends;
  }
  // Returns the bytes of the constants in memory that are not listed.
  int64_t others(const std::unordered_set<const Version*>& listed) const {
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
