// What a replay needs to know of an operator call: `Operation.recorded`, kept as PyTorch's own values.
//
// Python sees the sequence that the slow path records, (func, template, kwargs, rng, state, autocast), but it
// is made only on request: most operations are never run again.
#pragma once

#include <c10/util/SmallVector.h>

#include <memory>

#include "arguments.h"
#include "kernel_settings.h"

namespace dtrrun {

enum Hole : int { VALUE = -1, TENSOR = -2, STATISTICS = -3 };  // otherwise: the number of tensors in a list

// Returns a value for a recipe to keep. TorchScript passes the program's own lists, which the program may change later.
inline IValue to_keep(const IValue& value) {
  return value.isList() && value.use_count() > 1 ? value.deepcopy() : value;
}

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

  // In place of tensors: None, or which items of a list are present.
  IValue* values() { return reinterpret_cast<IValue*>(this + 1); }
  const IValue* values() const { return reinterpret_cast<const IValue*>(this + 1); }
  int* holes() { return reinterpret_cast<int*>(values() + count); }
  const int* holes() const { return reinterpret_cast<const int*>(values() + count); }
};

inline Ref template_of(const Recipe& recipe, size_t place) {
  int count = recipe.holes()[place];
  if (count == VALUE) return to_python(recipe.values()[place], (*recipe.enumerations)[place]);
  if (count == TENSOR) return Ref::copy(tensor_slot);
  Ref list = checked(PyList_New(count));
  const IValue& given = recipe.values()[place];  // a list of flags if some items may be None
  for (int i = 0; i < count; i++) {
    bool is_tensor = !given.isBoolList() || given.toBoolList().get(i);
    PyList_SET_ITEM(list.get(), i, Ref::copy(is_tensor ? tensor_slot : Py_None).release());
  }
  return list;
}

inline Ref as_sequence(const Recipe& recipe) {
  // A tensor is never a default, but the None in its place may look like one.
  const auto& schema = recipe.handle.schema();
  c10::SmallVector<IValue, 6> shown(recipe.values(), recipe.values() + recipe.count);
  for (size_t place = 0; place < shown.size(); place++)
    if (recipe.holes()[place] != VALUE) shown[place] = IValue(at::Tensor());
  auto [args, kwargs] =
      to_arguments(schema, shown.data(), PyList_New, [&](size_t place) { return template_of(recipe, place); });
  Ref nothing(PyTuple_New(0)), state = checked(PyLong_FromVoidPtr(const_cast<KernelState*>(recipe.state)));
  return Ref(PyTuple_Pack(6, recipe.func.get(), args.get(), kwargs ? kwargs.get() : Py_None,
                          recipe.rng ? recipe.rng.get() : Py_None, state.get(), nothing.get()));
}

}  // namespace dtrrun
