// What a replay needs to know of an operator call, kept as PyTorch's own values.
#pragma once

#include <c10/util/SmallVector.h>

#include <memory>

#include "arguments.h"
#include "kernel_settings.h"

namespace dtrrun {

enum Hole : int { VALUE = -1, TENSOR = -2, STATISTICS = -3, NESTED = -4 };  // otherwise: the number of tensors in a list

// What a replay restores besides the settings, of few operators.
struct Around {
  std::vector<std::pair<c10::DeviceType, at::ScalarType>> autocast;  // of the operators that its kernel calls
  Ref reading;  // what its kernel, written in Python, reads besides its arguments (`runtime/dispatch/kernels.py`); or null
};

// A recipe of `count` arguments, followed by their values and holes in the same block of memory: most operators have few.
class Recipe {
 public:
  Recipe(const c10::OperatorHandle& handle, const std::vector<Enumeration>* enumerations, PyObject* func,
         const KernelState* state, uint32_t count)
      : handle(handle), enumerations(enumerations), func(Ref::copy(func)), state(state), count(count) {
    std::uninitialized_default_construct_n(values(), count);
  }
  ~Recipe() { std::destroy_n(values(), count); }
  Recipe(const Recipe&) = delete;
  // Returns a multiple of the alignment of pointers.
  static size_t nbytes(size_t count) { return (sizeof(Recipe) + count * (sizeof(IValue) + sizeof(int)) + 7) / 8 * 8; }

  const c10::OperatorHandle handle;
  const std::vector<Enumeration>* enumerations;  // the operator's; never freed
  Ref func, rng;
  const KernelState* const state;  // the settings that the kernel saw
  const uint32_t count;
  std::unique_ptr<Around> around;

  // In place of tensors: None, or which items of a list are present.
  IValue* values() { return reinterpret_cast<IValue*>(this + 1); }
  const IValue* values() const { return reinterpret_cast<const IValue*>(this + 1); }
  int* holes() { return reinterpret_cast<int*>(values() + count); }
  const int* holes() const { return reinterpret_cast<const int*>(values() + count); }
};

}  // namespace dtrrun
