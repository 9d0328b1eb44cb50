// Predicts how much memory the first call of a signature will allocate, from the sizes of its inputs alone: PyTorch's shape
// functions know every operator, but take as long as a small kernel.
//
// The formulas give the number of elements of each result. Element sizes are learned from one call of each family, which is an
// operator with inputs of given types. That call's results also confirm that the formula holds for the family. Unusual calls
// have no formula or no family.
#pragma once

#include <ATen/core/Reduction.h>

#include <map>
#include <optional>

#include "operator_info.h"
#include "pytorch.h"
#include "signatures.h"

namespace dtrrun {

class Formulas {
 public:
  using Numbers = c10::SmallVector<int64_t, 3>;
  using Family = std::vector<uint64_t>;

  // Returns the bytes of each storage that a call with these arguments allocates, or nullopt if unknown.
  std::optional<Numbers> predict(const OperatorInfo& info, const IValue* values, size_t count) const {
    if (info.formula == Formula::NOTHING) return Numbers();
    auto family = family_of(info, values, count);
    auto itemsizes = family ? itemsizes_.find(*family) : itemsizes_.end();
    if (itemsizes == itemsizes_.end()) return std::nullopt;
    auto numels = elements(info.formula, values, count);
    if (!numels || numels->size() != itemsizes->second.size()) return std::nullopt;
    for (size_t i = 0; i < numels->size(); i++) {
      if ((*numels)[i] < 0 || (*numels)[i] >= MANY) return std::nullopt;  // PyTorch will raise an error
      (*numels)[i] *= itemsizes->second[i];
    }
    return numels;
  }

  // Returns the FLOPs of a matrix product, as PyTorch counts them; nullopt if unknown.
  static std::optional<int64_t> flops_of_product(const IValue* values, size_t count) {
    Sizes sizes = sizes_of(values, count);
    if (sizes.size() < 2) return std::nullopt;
    auto made = single(Formula::PRODUCT, sizes, values);
    return made ? std::optional(times(times(*made, 2), sizes[sizes.size() - 2].back())) : std::nullopt;
  }

  // What is known of a call before it runs (which consumes its arguments), for `learn`.
  struct Lesson {
    Family family;
    Numbers numels;  // of each result
  };
  std::optional<Lesson> lesson_of(const OperatorInfo& info, const IValue* values, size_t count) const {
    if (info.formula == Formula::UNKNOWN || info.formula == Formula::NOTHING) return std::nullopt;
    auto family = family_of(info, values, count);
    auto numels = family ? elements(info.formula, values, count) : std::nullopt;
    if (!numels || std::find(numels->begin(), numels->end(), 0) != numels->end()) return std::nullopt;
    return Lesson{std::move(*family), std::move(*numels)};
  }
  // Learns from such a call that has run with these results.
  void learn(OperatorInfo& info, const Lesson& lesson, const Stack& results) {
    const Numbers& numels = lesson.numels;
    Numbers itemsizes;
    for (const IValue& result : results) {
      if (!result.isTensor()) return;
      const at::Tensor& made = result.toTensor();
      if (!made.defined()) continue;  // a gradient that was not requested
      if (!made.has_storage()) return;
      int64_t itemsize = static_cast<int64_t>(made.itemsize());
      size_t place = itemsizes.size();
      if (place == numels.size() || static_cast<int64_t>(made.storage().nbytes()) != numels[place] * itemsize) {
        info.formula = Formula::UNKNOWN;  // the formula does not fit this operator
        return;
      }
      itemsizes.push_back(itemsize);
    }
    if (itemsizes.size() != numels.size()) {
      info.formula = Formula::UNKNOWN;
      return;
    }
    if (itemsizes_.size() >= LIMIT) itemsizes_.clear();
    itemsizes_[lesson.family] = itemsizes;
  }

 private:
  using Sizes = std::vector<c10::IntArrayRef>;
  static constexpr size_t LIMIT = 10'000;  // programs with endless new types: start over rather than grow forever
  enum : uint64_t { OTHER = 1, INT, DOUBLE, INTS, NO_TENSOR, NUMBER, TENSOR, TENSORS };

  // Returns everything that determines the types of a call's results.
  static std::optional<Family> family_of(const OperatorInfo& info, const IValue* values, size_t count) {
    Family family{info.number, static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype()))};
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
        family.resize(begin + !tensors.empty());  // their number does not matter
      } else if (value.isInt() && (*info.enumerations)[place] == Enumeration::NONE) {
        family.push_back(INT);
      } else if (value.isDouble()) {
        family.push_back(DOUBLE);
      } else if (value.isIntList()) {
        family.push_back(INTS);
      } else {
        if (!others.add(value)) return std::nullopt;
        family.push_back(OTHER);
      }
    }
    family.insert(family.end(), others.begin(), others.end());
    return family;
  }
  // Returns false for a tensor whose memory does not hold its content.
  static bool add(Family& family, uint64_t as, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      family.push_back(NO_TENSOR);
      return true;
    }
    if (!is_plain(tensor)) return false;
    bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    uint64_t weak = tensor.dim() == 0;  // such tensors count less in type promotion
    family.push_back((is_number ? NUMBER : as) | weak << 8 | static_cast<uint64_t>(tensor.scalar_type()) << 16);
    return true;
  }

  static constexpr int64_t MANY = int64_t{1} << 56;  // elements, more than any memory holds

  // Saturates at MANY.
  static int64_t times(int64_t one, int64_t other) {
    int64_t made;
    return __builtin_mul_overflow(one, other, &made) ? MANY : std::clamp(made, -MANY, MANY);
  }
  static int64_t product(c10::IntArrayRef numbers) {
    int64_t made = 1;
    for (int64_t number : numbers) made = times(made, number);
    return made;
  }

  // Returns the number of elements of each new storage.
  static std::optional<Numbers> elements(Formula formula, const IValue* values, size_t count) {
    Sizes sizes = sizes_of(values, count);
    if (sizes.size() < least(formula)) return std::nullopt;
    auto numel = [&](size_t place) { return product(sizes[place]); };
    auto first = sizes.empty() ? c10::IntArrayRef() : sizes.front();
    switch (formula) {
      case Formula::SHAPED:
        for (size_t place = 0; place < count; place++)
          if (values[place].isIntList()) return Numbers{product(values[place].toIntVector())};
        return std::nullopt;
      case Formula::COUNTED: return as_numbers(counted(values, count));
      case Formula::FIRST: return Numbers{numel(0)};
      case Formula::FIRST_TWICE: return Numbers{numel(0), numel(0)};
      case Formula::SECOND: return Numbers{numel(1)};
      case Formula::BATCH_NORM:
        if (!values[5].isBool() || !values[5].toBool() || first.size() < 2) return std::nullopt;
        return Numbers{numel(0), first[1], first[1]};
      case Formula::BATCH_NORM_BACKWARD: {
        auto mask = values[9].toBoolList();
        if (!mask.get(0) || sizes[1].size() < 2) return std::nullopt;
        return wanted(mask, {numel(1), sizes[1][1], sizes[1][1]});
      }
      case Formula::LAYER_NORM: {
        size_t normalized = values[1].toIntVector().size();
        if (normalized > first.size()) return std::nullopt;
        int64_t rows = product(first.slice(0, first.size() - normalized));
        return Numbers{numel(0), rows, rows};
      }
      case Formula::LAYER_NORM_BACKWARD: {
        int64_t columns = product(values[2].toIntVector());
        return wanted(values[7].toBoolList(), {numel(1), columns, columns});
      }
      case Formula::GROUP_NORM: {
        if (!values[3].isInt() || !values[6].isInt()) return std::nullopt;
        int64_t groups = times(values[3].toInt(), values[6].toInt());
        return Numbers{numel(0), groups, groups};
      }
      case Formula::GROUP_NORM_BACKWARD:
        if (!values[6].isInt()) return std::nullopt;
        return wanted(values[9].toBoolList(), {numel(1), values[6].toInt(), values[6].toInt()});
      case Formula::CONVOLUTION: return as_numbers(convolution(first, sizes[1], values));
      case Formula::CONVOLUTION_BACKWARD: {
        int64_t bias = values[3].isIntList() ? product(values[3].toIntVector()) : 0;
        return wanted(values[10].toBoolList(), {numel(1), numel(2), bias});
      }
      case Formula::MAX_POOL: {
        auto made = pooled(first, values, values[4].toIntVector(), values[5].toBool());
        return made ? std::optional(Numbers{*made, *made}) : std::nullopt;
      }
      case Formula::AVG_POOL: return as_numbers(pooled(first, values, {1, 1}, values[4].toBool()));
      case Formula::NLL_LOSS: {
        if (!values[3].isInt()) return std::nullopt;
        bool reduced = values[3].toInt() != at::Reduction::None || first.size() < 2;
        return Numbers{reduced ? 1 : first[0], 1};
      }
      default: return as_numbers(single(formula, sizes, values));
    }
  }

  static size_t least(Formula formula) {  // of tensors among the arguments
    switch (formula) {
      case Formula::SHAPED:
      case Formula::COUNTED: return 0;
      case Formula::PRODUCT:
      case Formula::EMBEDDING:
      case Formula::SECOND:
      case Formula::BATCH_NORM_BACKWARD:
      case Formula::LAYER_NORM_BACKWARD:
      case Formula::GROUP_NORM_BACKWARD:
      case Formula::CONVOLUTION: return 2;
      case Formula::CONVOLUTION_BACKWARD: return 3;
      default: return 1;
    }
  }
  static std::optional<Numbers> as_numbers(std::optional<int64_t> one) {
    return one ? std::optional(Numbers{*one}) : std::nullopt;
  }
  static Numbers wanted(const c10::List<bool>& mask, std::initializer_list<int64_t> numels) {
    Numbers all;
    size_t place = 0;
    for (int64_t numel : numels)
      if (mask.get(place++)) all.push_back(numel);
    return all;
  }

  // Returns the length of Python's `range(*values)`.
  static std::optional<int64_t> counted(const IValue* values, size_t count) {
    int64_t given[] = {0, 0, 1};
    size_t numbers = 0;
    while (numbers < std::min<size_t>(count, 3) && values[numbers].isScalar()) {
      if (!values[numbers].isInt()) return std::nullopt;
      given[numbers] = values[numbers].toInt();
      numbers++;
    }
    if (numbers == 0) return std::nullopt;
    if (numbers == 1) std::swap(given[0], given[1]);
    auto [begin, end, step] = given;
    if (step == 0 || std::any_of(given, given + 3, [](int64_t one) { return one <= -MANY || one >= MANY; })) return std::nullopt;
    if (step < 0) return begin > end ? (begin - end - 1) / -step + 1 : 0;
    return begin < end ? (end - begin - 1) / step + 1 : 0;
  }

  static std::optional<int64_t> convolution(c10::IntArrayRef size, c10::IntArrayRef weight, const IValue* values) {
    std::vector<int64_t> stride = values[3].toIntVector(), padding = values[4].toIntVector(), dilation = values[5].toIntVector(),
                         more = values[7].toIntVector();
    size_t dims = size.size() < 3 ? 0 : size.size() - 2;
    if (dims == 0 || weight.size() != size.size()) return std::nullopt;
    if (stride.size() != dims || padding.size() != dims || dilation.size() != dims || more.size() != dims) return std::nullopt;
    if (dims > 2 && std::any_of(more.begin(), more.end(), [](int64_t one) { return one != 0; })) return std::nullopt;
    bool transposed = values[6].toBool();
    int64_t made = times(size[0], transposed ? times(weight[1], values[8].toInt()) : weight[0]);
    if (made < 1) return std::nullopt;
    for (size_t i = 0; i < dims; i++) {
      int64_t reach = times(dilation[i], weight[i + 2] - 1) - times(2, padding[i]);
      if (!transposed && stride[i] < 1) return std::nullopt;
      int64_t length =
          transposed ? times(size[i + 2] - 1, stride[i]) + reach + more[i] + 1 : divided(size[i + 2] - reach - 1, stride[i]) + 1;
      if (length < 1) return std::nullopt;
      made = times(made, length);
    }
    return made;
  }

  static std::optional<int64_t> pooled(c10::IntArrayRef size, const IValue* values, const std::vector<int64_t>& dilation,
                                       bool ceil) {
    auto kernel = values[1].toIntVector(), given = values[2].toIntVector(), padding = values[3].toIntVector();
    const auto& stride = given.empty() ? kernel : given;
    if (size.size() < 2 || kernel.size() != 2 || stride.size() != 2 || padding.size() != 2) return std::nullopt;
    if (dilation.size() != 2) return std::nullopt;
    int64_t made = product(size.slice(0, size.size() - 2));
    for (size_t i = 0; i < 2; i++) {
      int64_t length = size[size.size() - 2 + i], step = stride[i];
      if (step < 1) return std::nullopt;
      int64_t rest = length + times(2, padding[i]) - times(dilation[i], kernel[i] - 1) - 1 + (ceil ? step - 1 : 0);
      int64_t windows = divided(rest, step) + 1;
      if (ceil && times(windows - 1, step) >= length + padding[i]) windows--;  // none may begin in the padding at the end
      if (windows < 1) return std::nullopt;
      made = times(made, windows);
    }
    return made < 1 ? std::nullopt : std::optional(made);
  }
  // Rounds down, as in Python.
  static int64_t divided(int64_t number, int64_t by) { return number / by - (number % by < 0); }

  // Returns the number of elements of the only new storage.
  static std::optional<int64_t> single(Formula formula, const Sizes& sizes, const IValue* values) {
    auto first = sizes.front(), last = sizes.back();
    switch (formula) {
      case Formula::ELEMENTWISE: return broadcast(sizes);
      case Formula::PRODUCT: {  // a bias may come first
        auto left = sizes[sizes.size() - 2], right = last;
        size_t dims = left.size();
        if (dims != right.size() || dims < 2 || dims > 3 || left[dims - 1] != right[dims - 2]) return std::nullopt;
        if (dims == 3 && left[0] != right[0]) return std::nullopt;
        return times(times(dims == 3 ? left[0] : 1, left[dims - 2]), right[dims - 1]);
      }
      case Formula::ALL: {
        int64_t total = 0;
        for (auto size : sizes) total = std::min(total + product(size), MANY);
        return total;
      }
      case Formula::GIVEN:
        if (!values[1].isIntList()) return std::nullopt;
        return product(values[1].toIntVector());
      case Formula::ONE: return 1;
      case Formula::REDUCED: {
        if (!values[1].isIntList() || values[1].toIntVector().empty()) return std::nullopt;
        std::vector<int64_t> left = first.vec();
        int64_t dims = static_cast<int64_t>(left.size());
        for (int64_t dim : values[1].toIntVector()) {
          if (dim < -dims || dim >= dims) return std::nullopt;
          left[dim < 0 ? dim + dims : dim] = 1;
        }
        return product(left);
      }
      case Formula::EMBEDDING:
        if (first.size() != 2) return std::nullopt;
        return times(product(last), first[1]);
      case Formula::EMBEDDING_BACKWARD:
        if (!values[2].isInt() || first.empty()) return std::nullopt;
        return times(values[2].toInt(), first.back());
      default: return std::nullopt;
    }
  }

  // Returns the sizes of all tensors, which the arguments keep alive. Numbers that the program passes have none.
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
    return product(all);
  }

  std::map<Family, Numbers> itemsizes_;  // of each storage
};

}  // namespace dtrrun
