// How much memory the first call of a signature will allocate: `runtime/formulas.py`, of whose formulas these are those
// with at most one result. An operator's first calls are Python's, until the size of its result's elements is known.
#pragma once

#include <map>
#include <optional>

#include "facts.h"
#include "signatures.h"

namespace dtrrun {

class Formulas {
 public:
  // The bytes that a call with these arguments allocates, or nothing if they are not known.
  std::optional<int64_t> predict(const Facts& facts, const IValue* values, size_t count) const {
    if (facts.formula == Formula::NOTHING) return 0;
    auto family = family_of(facts, values, count);
    auto itemsize = family ? itemsizes_.find(*family) : itemsizes_.end();
    if (itemsize == itemsizes_.end()) return std::nullopt;
    auto numel = elements(facts.formula, values, count);
    if (!numel) return std::nullopt;
    return *numel * itemsize->second;
  }

  // Such a call has run in Python, with these results.
  void learn(Facts& facts, const IValue* values, size_t count, const Stack& results) {
    if (facts.formula == Formula::UNKNOWN || facts.formula == Formula::NOTHING) return;
    auto family = family_of(facts, values, count);
    auto numel = elements(facts.formula, values, count);
    if (!family || !numel || *numel == 0 || results.size() != 1 || !results[0].isTensor()) return;
    const at::Tensor& made = results[0].toTensor();
    if (!made.defined() || !made.has_storage()) return;
    int64_t itemsize = static_cast<int64_t>(made.itemsize());
    if (static_cast<int64_t>(made.storage().nbytes()) != *numel * itemsize) {
      facts.formula = Formula::UNKNOWN;  // it does not fit this operator
      return;
    }
    if (itemsizes_.size() >= LIMIT) itemsizes_.clear();
    itemsizes_[*family] = itemsize;
  }

 private:
  using Family = std::vector<uint64_t>;
  using Sizes = std::vector<c10::IntArrayRef>;
  static constexpr size_t LIMIT = 10'000;  // as in runtime/formulas.py
  enum : uint64_t { OTHER = 1, INT, DOUBLE, INTS, NO_TENSOR, NUMBER, TENSOR, TENSORS };

  // All that determines the type of a call's result.
  static std::optional<Family> family_of(const Facts& facts, const IValue* values, size_t count) {
    Family family{reinterpret_cast<uint64_t>(&facts), static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype()))};
    Key others;
    for (size_t place = 0; place < count; place++) {
      const IValue& value = values[place];
      if (value.isTensor()) {
        if (!add(family, TENSOR, value.toTensor())) return std::nullopt;
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        size_t begin = family.size();
        for (const at::Tensor& tensor : tensors) {
          if (!add(family, TENSORS, tensor)) return std::nullopt;
          if (family.back() != family[begin]) return std::nullopt;
        }
        family.resize(begin + !tensors.empty());  // any number of them
      } else if (value.isInt() && (*facts.enumerations)[place] == Enumeration::NONE) {
        family.push_back(INT);
      } else if (value.isDouble()) {
        family.push_back(DOUBLE);
      } else if (value.isIntList()) {
        family.push_back(INTS);
      } else {
        if (value.isComplexDouble() || !others.add(value)) return std::nullopt;
        family.push_back(OTHER);
      }
    }
    family.insert(family.end(), others.begin(), others.end());
    return family;
  }
  static bool add(Family& family, uint64_t as, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      family.push_back(NO_TENSOR);
      return true;
    }
    bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    uint64_t weak = tensor.dim() == 0;  // such tensors count less in type promotion
    family.push_back((is_number ? NUMBER : as) | weak << 8 | static_cast<uint64_t>(tensor.scalar_type()) << 16);
    return !tensor.is_complex();
  }

  static std::optional<int64_t> elements(Formula formula, const IValue* values, size_t count) {
    Sizes sizes = sizes_of(values, count);
    size_t least = formula == Formula::PRODUCT || formula == Formula::EMBEDDING ? 2 : 1;
    if (sizes.size() < least) return std::nullopt;
    auto first = sizes.front(), last = sizes.back();
    switch (formula) {
      case Formula::ELEMENTWISE:
        return broadcast(sizes);
      case Formula::PRODUCT: {  // a bias may come first
        auto left = sizes[sizes.size() - 2], right = last;
        size_t dims = left.size();
        if (dims != right.size() || dims < 2 || dims > 3 || left[dims - 1] != right[dims - 2]) return std::nullopt;
        if (dims == 3 && left[0] != right[0]) return std::nullopt;
        return (dims == 3 ? left[0] : 1) * left[dims - 2] * right[dims - 1];
      }
      case Formula::ALL: {
        int64_t total = 0;
        for (auto size : sizes) total += c10::multiply_integers(size);
        return total;
      }
      case Formula::GIVEN:
        if (!values[1].isIntList()) return std::nullopt;
        return c10::multiply_integers(values[1].toIntVector());
      case Formula::ONE:
        return 1;
      case Formula::REDUCED: {
        if (!values[1].isIntList() || values[1].toIntVector().empty()) return std::nullopt;
        std::vector<int64_t> left = first.vec();
        int64_t dims = static_cast<int64_t>(left.size());
        for (int64_t dim : values[1].toIntVector()) {
          if (dim < -dims || dim >= dims) return std::nullopt;
          left[dim < 0 ? dim + dims : dim] = 1;
        }
        return c10::multiply_integers(left);
      }
      case Formula::EMBEDDING:
        if (first.size() != 2) return std::nullopt;
        return c10::multiply_integers(last) * first[1];
      case Formula::EMBEDDING_BACKWARD:
        if (!values[2].isInt() || first.empty()) return std::nullopt;
        return values[2].toInt() * first.back();
      default:
        return std::nullopt;
    }
  }

  // Those of all tensors, which the arguments keep alive. Numbers of the program's have none.
  static Sizes sizes_of(const IValue* values, size_t count) {
    Sizes sizes;
    auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) sizes.push_back(tensor.sizes());
    };
    for (size_t place = 0; place < count; place++) {
      if (values[place].isTensor()) add(values[place].toTensor());
      if (values[place].isTensorList())
        for (const at::Tensor& tensor : values[place].toTensorVector()) add(tensor);
    }
    return sizes;
  }

  static std::optional<int64_t> broadcast(const Sizes& sizes) {
    std::vector<int64_t> all;  // the last dimension first
    for (auto size : sizes) {
      if (size.size() > all.size()) all.resize(size.size(), 1);
      for (size_t place = 0; place < size.size(); place++) {
        int64_t own = size[size.size() - 1 - place];
        if (own == 1) continue;
        if (all[place] != 1 && all[place] != own) return std::nullopt;
        all[place] = own;
      }
    }
    return c10::multiply_integers(all);
  }

  std::map<Family, int64_t> itemsizes_;
};

}  // namespace dtrrun
