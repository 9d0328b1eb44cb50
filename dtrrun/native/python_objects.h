// PyTorch's objects in Python. PyTorch's headers for them include pybind11, and take four times as long to compile as the rest:
// so only python_objects.cpp includes them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "python.h"

namespace dtrrun {

bool is_tensor(PyObject* object);
const at::Tensor& tensor_of(PyObject* object);
Ref object_of(const at::Tensor& tensor);

bool is_storage(PyObject* object);
// Raises if it is not a storage, or one that has been given away.
const c10::Storage& checked_storage(PyObject* object);
const c10::Storage& storage_of(PyObject* storage);
// Returns the object that PyTorch has for a storage, or will have from now on.
Ref own_object_of(const c10::Storage& storage);
// Returns one that PyTorch does not know of.
Ref new_object_of(const c10::Storage& storage);

// Converts any value of an operator's, and back.
Ref python_value(const c10::IValue& value);
c10::IValue ivalue_of(PyObject* object, const c10::TypePtr& type);

// Returns the number of the node of autograd's graph that is running in this thread, or -1; and of the next one to be made.
int64_t node_under_way();
int64_t next_node();

// Returns the function of `torch.ops` for an operator.
Ref function_of(const c10::OperatorHandle& op);

}  // namespace dtrrun
