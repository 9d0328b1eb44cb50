#include "python_objects.h"

#include <ATen/SequenceNumber.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <new>
#include <type_traits>

// From torch/csrc/jit/python/pybind_utils.h, which takes minutes to compile.
namespace torch::jit {
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle object, const c10::TypePtr& type, std::optional<int32_t> n);
}  // namespace torch::jit

namespace dtrrun {

bool is_tensor(PyObject* object) { return THPVariable_Check(object); }
const at::Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }
Ref object_of(const at::Tensor& tensor) { return checked(THPVariable_Wrap(tensor)); }

// Makes `object`, whose memory is zeroed, hold a storage.
template <class Object>
void fill_object(Object* object, const c10::Storage& storage) {
  using Held = decltype(object->cdata);
  if constexpr (std::is_same_v<Held, c10::Storage>) {
    new (&object->cdata) Held(storage);
  } else {  // before 2.10, it may also be borrowed
    new (&object->cdata) Held(Held::owned(c10::Storage(storage)));
  }
}

bool is_storage(PyObject* object) { return PyObject_TypeCheck(object, &THPStorageType); }
const c10::Storage& storage_of(PyObject* storage) { return THPStorage_Unpack(storage); }
const c10::Storage& checked_storage(PyObject* object) {
  if (!is_storage(object)) throw c10::TypeError({__func__, __FILE__, 0}, "a storage is wanted");
  THPStorage_assertNotNull(object);
  return THPStorage_Unpack(object);
}
Ref own_object_of(const c10::Storage& storage) { return checked(THPStorage_Wrap(storage)); }
Ref new_object_of(const c10::Storage& storage) {
  auto* type = reinterpret_cast<PyTypeObject*>(THPStorageClass);
  Ref object = checked(type->tp_alloc(type, 0));
  fill_object(reinterpret_cast<THPStorage*>(object.get()), storage);
  return object;
}

Ref python_value(const c10::IValue& value) { return Ref(torch::jit::toPyObject(value).release().ptr()); }
c10::IValue ivalue_of(PyObject* object, const c10::TypePtr& type) { return torch::jit::toIValue(object, type, std::nullopt); }

int64_t node_under_way() {
  auto node = torch::autograd::get_current_node();
  // Some have no number of their own, such as those that accumulate gradients.
  return node ? static_cast<int64_t>(std::min<uint64_t>(node->sequence_nr(), INT64_MAX)) : -1;
}
int64_t next_node() { return static_cast<int64_t>(at::sequence_number::peek()); }

Ref function_of(const c10::OperatorHandle& op) { return Ref::copy(torch::detail::getTorchApiFunction(op).ptr()); }

// -- errors ---------------------------------------------------------------------------------------------------

// Throws the current Python error, for PyTorch to pass on to the program.
//
// `python_error::persist` would ask for the error's text, for C++ that catches it. A budget error's advice takes a tenth of a
// second to work out, and is worked out when the program reads it: C++ gets the text without it.
void raise() {
  python_error error;
  PyErr_Fetch(&error.type, &error.value, &error.traceback);
  Ref brief(error.value == nullptr ? nullptr : PyObject_GetAttrString(error.value, "without_advice"));
  const char* text = brief && PyUnicode_Check(brief.get()) ? PyUnicode_AsUTF8(brief.get()) : nullptr;
  PyErr_Clear();
  if (text != nullptr)
    error.message = text;
  else
    error.build_message();
  throw std::move(error);
}

// Not HANDLE_TH_ERRORS, which would also show warnings here: they belong to the program's own call.
void set_python_error() { torch::translate_exception_to_python(std::current_exception()); }

// Converts a C++ exception to a Python exception.
Ref as_error(const std::exception_ptr& exception) {
  torch::translate_exception_to_python(exception);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Ref types(type), frames(traceback);
  return Ref(value);
}

bool is_error_of(PyObject* type) {
  try {
    throw;
  } catch (const python_error& error) {
    return PyErr_GivenExceptionMatches(error.type, type) != 0;
  } catch (const pybind11::error_already_set& error) {
    return error.matches(type);
  } catch (...) {
    return false;
  }
}

bool is_no_error() {
  try {
    throw;
  } catch (const python_error& found) {
    Gil gil;
    PyObject* type = found.type != nullptr ? found.type : PyErr_Occurred();
    if (type != nullptr && !PyErr_GivenExceptionMatches(type, PyExc_Exception)) return true;
    if (found.type == nullptr) PyErr_Clear();
  } catch (const pybind11::error_already_set& found) {
    Gil gil;
    return !found.matches(PyExc_Exception);
  } catch (...) {
  }
  return false;
}

std::exception_ptr without_frames() {
  Ref error = as_error(std::current_exception());
  try {
    if (PyException_SetTraceback(error.get(), Py_None) < 0) raise();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
    raise();
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace dtrrun
