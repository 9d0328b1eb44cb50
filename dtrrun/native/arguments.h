// Converts an operator's arguments and results between PyTorch's dispatcher and Python, to and from what `__torch_dispatch__`
// has: trailing defaults are left out, and numbers that stand for dtypes become dtypes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/Export.h>

#include <algorithm>

#include "python.h"
#include "python_objects.h"
#include "pytorch.h"

// From torch/csrc/DynamicTypes.h and torch/csrc/utils/tensor_memoryformats.h, which take long to compile.
struct THPDtype;
struct THPLayout;
namespace torch {
TORCH_PYTHON_API THPDtype* getTHPDtype(at::ScalarType type);
TORCH_PYTHON_API THPLayout* getTHPLayout(at::Layout layout);
// From torch/csrc/utils/python_arg_parser.h.
TORCH_PYTHON_API bool should_allow_numbers_as_tensors(const std::string& name);
}  // namespace torch
namespace torch::utils { TORCH_PYTHON_API PyObject* getTHPMemoryFormat(at::MemoryFormat format); }  // namespace torch::utils

namespace dtrrun {

using c10::IValue;
using torch::jit::Stack;

// What Python gets in place of a plain conversion. TENSOR: a tensor even if it stands for a number.
enum class Enumeration : uint8_t { NONE, DTYPE, LAYOUT, MEMORY_FORMAT, TENSOR };

// Returns true if Python may call an operator with numbers in place of tensors. For other operators, PyTorch's conversion would
// turn a tensor that stands for a number (`is_wrapped_number`) into that number, which they would refuse.
inline bool takes_numbers(const c10::OperatorName& name) {
  constexpr std::string_view ATEN = "aten::";
  return name.name.starts_with("prims::") ||
         (name.name.starts_with(ATEN) && torch::should_allow_numbers_as_tensors(name.name.substr(ATEN.size())));
}

inline Enumeration enumeration_of(const c10::Argument& argument, bool takes_numbers) {
  c10::TypePtr type = argument.real_type();
  while (type->kind() == c10::TypeKind::OptionalType || type->kind() == c10::TypeKind::ListType) type = type->containedType(0);
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return takes_numbers ? Enumeration::NONE : Enumeration::TENSOR;
    case c10::TypeKind::ScalarTypeType: return Enumeration::DTYPE;
    case c10::TypeKind::LayoutType: return Enumeration::LAYOUT;
    case c10::TypeKind::MemoryFormatType: return Enumeration::MEMORY_FORMAT;
    default: return Enumeration::NONE;
  }
}

// Returns true if it is a leaf that requires gradients (`is_leaf` in dispatch/arguments.py).
inline bool is_leaf(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return false;
  try {
    return tensor.is_leaf();
  } catch (const c10::Error&) {  // one of several views of an overwritten base
    return false;
  }
}

inline bool stands_for_number(const IValue& value) {
  return value.isTensor() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

inline bool any_stands_for_number(const IValue& list) {
  auto items = list.toListRef();
  return std::any_of(items.begin(), items.end(), stands_for_number);
}

inline Ref to_python(const IValue& value, Enumeration enumeration) {
  if (enumeration == Enumeration::TENSOR) {
    if (stands_for_number(value)) return object_of(value.toTensor());
    if (value.isList() && any_stands_for_number(value)) {
      auto items = value.toListRef();
      Ref list = checked(PyList_New(static_cast<Py_ssize_t>(items.size())));
      for (size_t i = 0; i < items.size(); i++) PyList_SET_ITEM(list.get(), i, to_python(items[i], enumeration).release());
      return list;
    }
  } else if (enumeration != Enumeration::NONE && value.isInt()) {
    int64_t number = value.toInt();
    PyObject* found = nullptr;
    if (enumeration == Enumeration::DTYPE)
      found = reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(number)));
    else if (enumeration == Enumeration::LAYOUT)
      found = reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(number)));
    else
      found = torch::utils::getTHPMemoryFormat(static_cast<at::MemoryFormat>(number));
    return Ref::copy(found);
  }
  return python_value(value);
}

// Returns the number of leading arguments that Python gets by position; those after are defaults or keywords.
inline size_t positional(const c10::FunctionSchema& schema, const IValue* values) {
  const auto& arguments = schema.arguments();
  size_t count = arguments.size();
  while (count > 0 && arguments[count - 1].kwarg_only()) count--;
  while (count > 0 && arguments[count - 1].default_value().has_value() &&
         *arguments[count - 1].default_value() == values[count - 1])
    count--;
  return count;
}

// Calls `convert(place)` for each argument that Python gets, and returns (args, kwargs); kwargs may be null.
template <class Sequence, class Convert>
std::pair<Ref, Ref> to_arguments(const c10::FunctionSchema& schema, const IValue* values, Sequence make, const Convert& convert) {
  const auto& arguments = schema.arguments();
  size_t count = positional(schema, values);
  Ref args = checked(make(static_cast<Py_ssize_t>(count)));
  for (size_t place = 0; place < count; place++) {
    PyObject* value = convert(place).release();
    if (value == nullptr) raise();
    if (PyTuple_Check(args.get()))
      PyTuple_SET_ITEM(args.get(), place, value);
    else
      PyList_SET_ITEM(args.get(), place, value);
  }
  Ref kwargs;
  for (size_t place = 0; place < arguments.size(); place++) {
    const auto& argument = arguments[place];
    if (!argument.kwarg_only()) continue;
    if (argument.default_value().has_value() && *argument.default_value() == values[place]) continue;
    if (!kwargs) kwargs = checked(PyDict_New());
    Ref value = convert(place);
    if (!value || PyDict_SetItemString(kwargs.get(), argument.name().c_str(), value.get()) < 0) raise();
  }
  return {std::move(args), std::move(kwargs)};
}

inline PyObject* tensor_slot = nullptr;  // core.graph.TENSOR_SLOT

// Returns true for a tensor that recipes leave out (`flatten_into` in dispatch/arguments.py).
inline bool is_hole(const IValue& value) { return value.isTensor() && value.toTensor().defined() && !stands_for_number(value); }

// Returns (args, kwargs) as lists, with `tensor_slot` in place of each tensor; kwargs may be null. holes: for each argument, -1 if it is
// kept as it is (`Hole`); null if tensors are not.
inline std::pair<Ref, Ref> templates_of(const c10::FunctionSchema& schema, const IValue* values,
                                        const std::vector<Enumeration>& enumerations, const int* holes = nullptr) {
  return to_arguments(schema, values, PyList_New, [&](size_t place) {
    const IValue& value = values[place];
    if (is_hole(value) && (holes == nullptr || holes[place] != -1)) return Ref::copy(tensor_slot);
    if (!value.isTensorList() && !value.isOptionalTensorList()) return to_python(value, enumerations[place]);
    auto items = value.toListRef();
    Ref list = checked(PyList_New(static_cast<Py_ssize_t>(items.size())));
    for (size_t i = 0; i < items.size(); i++)
      PyList_SET_ITEM(list.get(), i, Ref::copy(is_hole(items[i]) ? tensor_slot : Py_None).release());
    return list;
  });
}

// Converts what Python returned for an operator to its results.
inline Stack results_from(const c10::FunctionSchema& schema, PyObject* result) {
  const auto& returns = schema.returns();
  if (returns.empty()) return {};
  if (returns.size() == 1) return {ivalue_of(result, returns[0].real_type())};
  Stack results;
  Ref items = checked(PySequence_Fast(result, "dtrrun: an operator with several results returned one"));
  for (size_t place = 0; place < returns.size(); place++)
    results.push_back(ivalue_of(PySequence_Fast_GET_ITEM(items.get(), place), returns[place].real_type()));
  return results;
}

// Returns a tensor for Python to look at: the program's own gets no Python object, since PyTorch may be about to give it one
// itself (`torch.nn.Parameter`). A tensor without a plain storage is shown itself, since it is counted until it dies.
inline IValue shown(const IValue& value) {
  if (!value.isTensor()) return value;
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined() || !tensor.has_storage() || object_in(tensor.unsafeGetTensorImpl()->pyobj_slot()) ||
      tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python))
    return value;
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

// Converts an operator's results to what Python returns.
inline Ref results(const Stack& all) {
  if (all.empty()) return Ref::copy(Py_None);
  if (all.size() == 1) return to_python(all[0], Enumeration::TENSOR);
  Ref tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(all.size())));
  for (size_t place = 0; place < all.size(); place++)
    PyTuple_SET_ITEM(tuple.get(), place, to_python(all[place], Enumeration::TENSOR).release());
  return tuple;
}

inline Ref shown_results(const Stack& all) {
  Stack shown_ones;
  for (const IValue& value : all) {
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(shown(tensor).toTensor());
      shown_ones.push_back(std::move(list));
    } else {
      shown_ones.push_back(shown(value));
    }
  }
  return results(shown_ones);
}

}  // namespace dtrrun
